"""The lines of a batch's input: checked all at once before the first one runs, then read as the
rows of a run.

The form of a line is that of OpenAI's batch files, and one broken line refuses the batch. A body
that is no valid request is an error of its line alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.api.request import ChatRequest
from jobs.api.wire import describe
from jobs.data_sets.id_index import IdIndex
from jobs.data_sets.requests import check_size, json_size
from jobs.data_sets.source import ErrorRow, RequestRow, SourceRow, Wanted
from jobs.data_sets.text_rows import json_rows, lines_of
from jobs.errors import InvalidRequest, invalid
from jobs.gateway.batches.forms import renamed_for, request_of
from jobs.gateway.tenants import Tenant

FIELDS = ("custom_id", "method", "url", "body")
MAX_ID = 512  # characters of a custom_id
MAX_ERRORS = 100  # that a batch names
OVERHEAD = 1024  # bytes that a job has beside its request


@dataclass(frozen=True, slots=True)
class Line:
    """A line whose form is valid. number: for people, from 1. index: without blank lines, from
    0."""

    number: int
    index: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a batch is refused. line: its number, if it is about one."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("code", "message", "param", "line")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Checked:
    """What is known of an input. models: of its bodies, in their order."""

    total: int
    models: list[str]
    faults: list[Fault]


def read_lines(file: Path, endpoint: str) -> Iterator[Line | Fault]:
    """The lines of an input that are not blank."""
    with file.open("rb") as opened:
        for index, (number, data) in enumerate(json_rows(lines_of(opened))):
            if isinstance(data, InvalidRequest):
                yield Fault("invalid_json_line", data.message, None, number)
                continue
            try:
                yield _line(number, index, data, endpoint)
            except _Faulty as error:
                yield error.fault


def check_lines(file: Path, endpoint: str) -> Checked:
    """Read a whole input."""
    found = Checked(0, [], [])
    models: dict[str, None] = {}
    with closing(IdIndex()) as ids:
        for line in read_lines(file, endpoint):
            found.total += 1
            if isinstance(line, Line):
                first = ids.add("custom_id", line.custom_id, f"line {line.number}")
                if first is None:
                    if isinstance(name := line.body.get("model"), str):
                        models[name] = None
                    continue
                line = Fault(
                    "duplicate_custom_id",
                    f"{first} has the custom_id {line.custom_id!r} as well: give each its own",
                    "custom_id",
                    line.number,
                )
            if len(found.faults) < MAX_ERRORS:
                found.faults.append(line)
    if not found.total:
        found.faults.append(Fault("empty_file", "the input file has no lines"))
    found.models = [*models]
    return found


class BatchRows:
    """The lines of an input as rows of a run."""

    samples = 1

    def __init__(self, file: Path, endpoint: str, tenant: str | None, run: str) -> None:
        self._file, self._endpoint, self._run = file, endpoint, run
        self._tenant = Tenant(tenant)

    def read(self, wanted: Wanted) -> Iterator[SourceRow | None]:
        for index, line in enumerate(read_lines(self._file, self._endpoint)):
            yield self._row(index, line) if wanted(index) else None

    def _row(self, index: int, line: Line | Fault) -> SourceRow:
        place = f"line {line.number if isinstance(line, Line) else line.line}"
        if isinstance(line, Fault):  # another version of the gateway has checked the input
            return ErrorRow(index, index, 0, place, invalid(line.message, line.param), {})
        try:
            request = self._request(line)
            size = json_size(request) + OVERHEAD
            check_size(size)
        except InvalidRequest as error:
            known: dict[str, Any] = {"job": {"custom_id": line.custom_id}}
            if isinstance(line.body.get("model"), str):
                known["model"] = line.body["model"]
            return ErrorRow(index, index, 0, place, error, known)
        return RequestRow(index, index, 0, place, request, size)

    def _request(self, line: Line) -> ChatRequest:
        body = self._tenant.claim(request_of(self._endpoint, line.body))
        options = body.get("job")
        if options is None:
            options = {}
        try:
            if not isinstance(options, dict):
                return ChatRequest.parse(body)  # which has the sentence
            row = {"run": self._run, "row": line.index, "custom_id": line.custom_id}
            return ChatRequest.parse({**body, "job": {"priority": "bulk", **options, **row}})
        except InvalidRequest as error:
            raise renamed_for(self._endpoint, error) from None


class _Faulty(Exception):
    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def _line(number: int, index: int, data: Mapping[str, Any], endpoint: str) -> Line:
    """Raises _Faulty."""

    def fault(code: str, message: str, param: str) -> _Faulty:
        return _Faulty(Fault(code, message, param, number))

    name = data.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_ID:
        problem = f"a text of 1 to {MAX_ID} characters, got {describe(name)}"
        raise fault("invalid_request", f"custom_id: expected {problem}", "custom_id")
    if data.get("method") != "POST":
        got = describe(data.get("method"))
        raise fault("invalid_request", f"method: expected 'POST', got {got}", "method")
    if data.get("url") != endpoint:
        problem = f"the endpoint of the batch, {endpoint}, got {describe(data.get('url'))}"
        raise fault("url_mismatch", f"url: expected {problem}", "url")
    if not isinstance(body := data.get("body"), dict):
        raise fault("invalid_request", f"body: expected an object, got {describe(body)}", "body")
    unknown = next((one for one in data if one not in FIELDS), None)
    if unknown is not None:
        known = ", ".join(FIELDS)
        raise fault(
            "invalid_request", f"unknown field {describe(unknown)}: a line has {known}", unknown
        )
    return Line(number, index, name, body)
