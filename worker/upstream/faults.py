"""Errors of an upstream: what its status and its body mean for a job."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from jobs.encoding import encodable, from_json
from jobs.errors import ERROR_CODES, ErrorCode, JobError

MAX_TEXT = 500  # characters of the upstream's message
PASSING = frozenset((408, 425, 429))  # statuses below 500 after which the same request may work
TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
CONTEXT = re.compile(r"context[ _](length|size|window)|maximum context|context_length", re.I)


class NotNow(Exception):
    """The upstream has not begun a request, and may take it later. `seconds`: when, if it says so;
    `limited`: it asks to be sent less, and is well otherwise."""

    def __init__(
        self, error: JobError, seconds: float | None = None, limited: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error, self.seconds, self.limited = error, seconds, limited


def fault_of(status: int, headers: Mapping[str, str], body: bytes) -> JobError | NotNow:
    """The meaning of a response whose status is not 200."""
    said, code = message_of(headers.get("content-type", ""), body)
    message = f"the upstream answers {status}: {said}"
    # A gateway says so of a job that its queue has tried already; it has our codes.
    if headers.get("x-should-retry") == "false" and code in ERROR_CODES:
        return JobError(code, message)  # type: ignore[arg-type]  # it is one of them
    if status in PASSING or status >= 500:
        kind: ErrorCode = "unavailable" if status in PASSING else "internal"
        seconds = retry_after(headers, datetime.now(UTC))
        return NotNow(JobError(kind, message), seconds, limited=status == 429)
    if status == 404:
        return JobError("model_not_found", message, "model")
    if 400 <= status < 500:
        return JobError(_client_code(said, code), message)
    place = headers.get("location", "")
    hint = f": it has moved to {place}, give --upstream that" if place else ""
    return JobError("internal", f"{message}{hint}")


def fault_in_stream(error: Any) -> JobError:
    """The error that an upstream sends instead of a chunk. It has begun the answer, so that only a
    new attempt may help."""
    about = error if isinstance(error, dict) else {}
    said, code = _message(about or str(error)), str(about.get("code") or about.get("type") or "")
    status = int(code) if code.isdecimal() and len(code) == 3 else 500
    message = f"the upstream ended the answer with an error: {said}"
    if about.get("code") in ERROR_CODES:
        return JobError(about["code"], message)
    if CONTEXT.search(code) or (400 <= status < 500 and status not in PASSING):
        return JobError(_client_code(said, code), message)
    if "invalid_request" in code or "BadRequest" in code:
        return JobError(_client_code(said, code), message)
    return JobError("unavailable", message)


def message_of(content_type: str, body: bytes) -> tuple[str, str]:
    """The message of an error's body, and the upstream's code for it, if it has one."""
    text = body.decode("utf-8", "replace").strip()
    if "html" in content_type or text[:200].lower().startswith(("<!doctype html", "<html")):
        title = TITLE.search(text)
        named = f" with the title {_short(html.unescape(title[1]))!r}" if title else ""
        return f"an HTML page{named} instead of JSON", ""
    try:
        found = from_json(body)
    except (ValueError, RecursionError):
        return _short(text) or "nothing", ""
    error = found.get("error", found) if isinstance(found, dict) else found
    if isinstance(error, dict):
        return _message(error), str(error.get("code") or error.get("type") or "")
    return _short(str(error)), ""


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """The seconds that the upstream asks to wait; None if it says nothing that can be read."""
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        text = headers.get(name, "").strip()
        if re.fullmatch(r"\d{1,12}(\.\d{1,9})?", text):
            return float(text) / unit
    try:
        at = parsedate_to_datetime(headers.get("retry-after", ""))
    except (ValueError, TypeError):
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - now).total_seconds())


def _client_code(said: str, code: str) -> ErrorCode:
    """The code of a request that can't run as it is."""
    return "context_length_exceeded" if CONTEXT.search(f"{code} {said}") else "invalid_request"


def _message(error: Any) -> str:
    """The text for people in an error's object."""
    if isinstance(error, dict):
        error = next((error[key] for key in ("message", "detail") if error.get(key)), error)
    return _short(error if isinstance(error, str) else str(error))


def _short(text: str) -> str:
    text = encodable(" ".join(text.split()))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
