"""Read chat requests from a JSONL file; all lines are validated before any is enqueued."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jobs.api.request import ChatRequest
from jobs.api.wire import describe
from jobs.errors import InvalidRequest, invalid

BATCH_URL = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A valid line."""

    number: int
    request: ChatRequest


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is not a valid request."""

    number: int
    error: InvalidRequest

    def __str__(self) -> str:
        named = not self.error.param or self.error.param in self.error.message
        field = "" if named else f" [{self.error.param}]"
        return f"line {self.number}{field}: {self.error.message}"


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values from the command line; each replaces the value in the line."""

    model: str | None = None
    run: str | None = None
    priority: str | None = None


def read_requests(
    lines: Iterable[bytes], overrides: Overrides
) -> tuple[list[RequestLine], list[InvalidLine]]:
    """Return the requests and the invalid lines. Blank lines are skipped."""
    valid: list[RequestLine] = []
    invalid_lines: list[InvalidLine] = []
    ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = _request_fields(_object(line))
            row = len(valid) + len(invalid_lines)
            request = ChatRequest.parse(_override(fields, overrides, row))
            if request.job.id and ids.setdefault(request.job.id, number) != number:
                raise invalid(f"job.id: line {ids[request.job.id]} has the same id", "job.id")
            valid.append(RequestLine(number, request))
        except InvalidRequest as error:
            invalid_lines.append(InvalidLine(number, error))
    return valid, invalid_lines


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise invalid(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"not JSON: {error}") from None
    if isinstance(data, list):
        raise invalid("expected a JSON object, got an array: write each request on its own line")
    if not isinstance(data, dict):
        raise invalid(f"expected a JSON object, got {describe(data)}")
    return data


def _request_fields(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the request in a line.

    A line of an OpenAI batch file holds them in `body`. Otherwise `prompt` or `text` becomes the
    user message, `custom_id` and `target` move to `job`, and `task` moves to `metadata`.
    """
    if "body" in data:
        return _batch_body(data)
    fields = dict(data)
    for name in ("prompt", "text"):
        if name in fields and "messages" not in fields:
            fields["messages"] = [{"role": "user", "content": fields.pop(name)}]
    for name in ("custom_id", "target"):
        if name in fields:
            fields["job"] = {**_mapping(fields, "job"), name: fields.pop(name)}
    if "task" in fields:
        fields["metadata"] = {**_mapping(fields, "metadata"), "task": fields.pop("task")}
    return fields


def _batch_body(data: dict[str, Any]) -> dict[str, Any]:
    for name in data.keys() - {"custom_id", "method", "url", "body"}:
        raise invalid(f"unknown field '{name}' in a batch line", name)
    if data.get("method", "POST") != "POST":
        raise invalid(f"method: must be POST, got {data['method']!r}", "method")
    if data.get("url", BATCH_URL) != BATCH_URL:
        raise invalid(f"url: must be {BATCH_URL}, got {data['url']!r}", "url")
    body = _mapping(data, "body")
    return {**body, "job": {**_mapping(body, "job"), "custom_id": data.get("custom_id")}}


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected an object, got {value!r}", name)
    return value


def _override(fields: dict[str, Any], overrides: Overrides, row: int) -> dict[str, Any]:
    job = dict(_mapping(fields, "job"))
    if overrides.run is not None:
        job = {"priority": "bulk", **job, "run": overrides.run, "row": row}
    if overrides.priority is not None:
        job["priority"] = overrides.priority
    model = fields.get("model") if overrides.model is None else overrides.model
    if model is None:
        return {**fields, "job": job}
    return {**fields, "model": model, "job": job}
