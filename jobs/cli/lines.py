"""Lines of a JSONL file → chat requests, every line checked before anything is enqueued."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jobs.api.request import ChatRequest
from jobs.errors import InvalidRequest, invalid

BATCH_URL = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Row:
    """One line that can be enqueued."""

    line: int
    request: ChatRequest


@dataclass(frozen=True, slots=True)
class BadLine:
    """One line that can't, and why."""

    line: int
    error: InvalidRequest

    def __str__(self) -> str:
        named = not self.error.param or self.error.param in self.error.message
        field = "" if named else f" [{self.error.param}]"
        return f"line {self.line}{field}: {self.error.message}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the command line says for all rows."""

    model: str | None = None  # wins over the rows' own
    run: str | None = None
    priority: str | None = None


def read(lines: Iterable[bytes], defaults: Defaults) -> tuple[list[Row], list[BadLine]]:
    """Requests of all lines that are not blank, and the lines that hold none."""
    rows: list[Row] = []
    bad: list[BadLine] = []
    ids: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = _request_fields(_object(line))
            request = ChatRequest.parse(_with_defaults(fields, defaults, row=len(rows) + len(bad)))
            if request.job.id and ids.setdefault(request.job.id, number) != number:
                raise invalid(f"job.id: line {ids[request.job.id]} has the same", "job.id")
            rows.append(Row(number, request))
        except InvalidRequest as error:
            bad.append(BadLine(number, error))
    return rows, bad


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise invalid(f"not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"not JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid("a line is a JSON object")
    return data


def _request_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The request in a line: an OpenAI batch line, or a row whose `prompt` or `text` stands for one
    user message and whose `custom_id`, `target` and `task` are kept beside the request."""
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
        raise invalid(f"method: only POST, got {data['method']!r}", "method")
    if data.get("url", BATCH_URL) != BATCH_URL:
        raise invalid(f"url: only {BATCH_URL}, got {data['url']!r}", "url")
    body = _mapping(data, "body")
    return {**body, "job": {**_mapping(body, "job"), "custom_id": data.get("custom_id")}}


def _mapping(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected an object, got {value!r}", name)
    return value


def _with_defaults(fields: dict[str, Any], defaults: Defaults, row: int) -> dict[str, Any]:
    job = dict(_mapping(fields, "job"))
    if defaults.run is not None:
        job = {"priority": "bulk", **job, "run": defaults.run, "row": row}
    if defaults.priority is not None:
        job["priority"] = defaults.priority
    model = fields.get("model") if defaults.model is None else defaults.model
    named = {} if model is None else {"model": model}
    return {**fields, **named, "job": job}
