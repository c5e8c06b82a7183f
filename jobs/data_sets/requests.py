"""Rows of a file → chat requests, with the options of the caller."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from shlex import quote
from typing import Any

from jobs.api.json_values import check_json
from jobs.api.request import ChatRequest
from jobs.api.unsupported_fields import IGNORED_FIELDS, REFUSED_FIELDS
from jobs.data_sets.fields import SOURCES, Row, request_fields
from jobs.data_sets.id_index import IdIndex
from jobs.errors import InvalidRequest, invalid
from jobs.store.custom_ids import content_id
from jobs.store.rq_layout import MAX_DATA

BATCH_URL = "/v1/chat/completions"
BATCH_FIELDS = ("custom_id", "method", "url", "body")
ROW_FIELDS = ("prompt", "text", "custom_id", "target", "task")  # beside those of a request
KEEP_ALL = "*"
JSON = (bool, int, float, list, dict)  # beside text
MAX_NAMED = 5  # unknown fields in one error
MAX_COMPARED = 50  # of them, with the fields that may be meant
OVERHEAD = 1024  # bytes that a job has beside its request


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A valid row."""

    number: int
    request: ChatRequest
    size: int  # bytes, as JSON


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A row that is not a valid request."""

    number: int
    error: InvalidRequest

    @property
    def sentence(self) -> str:
        """The error, and the field if the error does not name it."""
        param = repr(self.error.param or "")[1:-1]  # on one line, as in the message
        where = "" if param.rpartition(".")[2] in self.error.message else f" [{param}]"
        return f"{self.error.message}{where}"


def _map_option(column: str, field: str) -> str:
    return f"--map {quote(column) if column.isprintable() else 'COLUMN'}={field}"


@dataclass(frozen=True, slots=True)
class OptionNames:
    """The options that errors name, as their caller writes them."""

    option: Callable[[str], str] = lambda name: f"-o {name}"
    map: Callable[[str, str], str] = _map_option  # of a column and its field
    mode: Callable[[str], str] = lambda mode: f"--mode {mode}"


COMMAND_LINE = OptionNames()


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the caller; each replaces the value in the row.

    `keep`: columns that go to the request's metadata, and so to the results; "*": all unknown ones.
    """

    model: str | None = None
    run: str | None = None
    priority: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[str, ...] = ()
    tenant: str | None = None
    delay: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # fields by their columns, of --map
    ignore_unknown: bool = False  # columns that are no fields and not kept, instead of refusing
    own_ids: bool = False  # the rows get ids that no row may choose
    mode: str = "chat"  # of `chatjobs run`
    delimiter: str | None = None  # before continuations; None: a space if there is no white space
    option_names: OptionNames = COMMAND_LINE


def read_requests(
    rows: Iterable[Row], overrides: Overrides, unit: str = "line", part: str = "field"
) -> Iterator[RequestLine | InvalidLine]:
    """Yield the request of each row, or its error. `unit`: what the numbers count; `part`: what
    the values of a row are called."""
    with closing(IdIndex()) as ids:
        reader = RequestReader(overrides, ids, part)
        for index, (number, data) in enumerate(rows):
            yield reader.read(index, f"{unit} {number}", number, data)


class RequestReader:
    """Makes requests of the rows of a file. `ids`: of the rows before, of this file and others;
    None: nobody knows them. `part`: what the values of a row are called."""

    def __init__(self, overrides: Overrides, ids: IdIndex | None, part: str = "field") -> None:
        self._overrides, self._ids, self._part = overrides, ids, part

    def read(
        self, index: int | None, place: str, number: int, data: dict[str, Any] | InvalidRequest
    ) -> RequestLine | InvalidLine:
        """The request of a row, or its error. `index`: of the row, from 0; None: it has none.
        `place`: for people."""
        overrides, part = self._overrides, self._part
        try:
            if isinstance(data, InvalidRequest):
                raise data
            fields = _override(_request_fields(data, overrides, part), overrides, index)
            if fields.get("model") is None:
                raise without_model(part, "body" in data)
            request = ChatRequest.parse(fields)
            self._check_id(request, place)
            self._identify(request, index, place)
            size = json_size(request) + OVERHEAD
            check_size(size)
        except InvalidRequest as error:
            given = {} if isinstance(data, InvalidRequest) else data
            return InvalidLine(number, in_terms_of_file(error, _origins(given, overrides, part)))
        return RequestLine(number, request, size)

    def skip(self, place: str, data: dict[str, Any] | InvalidRequest) -> None:
        """Keep the custom_id of a row of a run that need not be read, or is invalid."""
        run = self._overrides.run
        custom_id = custom_id_of(data)
        if self._ids is not None and run is not None and custom_id is not None:
            self._ids.add("custom_id", f"{run}/{custom_id}", place)

    def _check_id(self, request: ChatRequest, place: str) -> None:
        if self._overrides.own_ids and request.job.repeat is not None:
            raise invalid(
                "job.repeat: a row of chatjobs run has the samples of --num-samples: remove it",
                "job.repeat",
            )
        if request.job.id is None:
            return
        if self._overrides.own_ids:
            raise invalid("job.id: a row of chatjobs run has no id of its own: remove it", "job.id")
        first = None if self._ids is None else self._ids.add("id", request.job.id, place)
        if first is not None:
            raise invalid(f"job.id: {first} has the same id", "job.id")

    def _identify(self, request: ChatRequest, index: int | None, place: str) -> None:
        """Let custom_id identify a request that has one: its row in a run, else its content's
        job."""
        options = request.job
        if options.custom_id is None:
            return
        if options.run is None:
            options.id = options.id or content_id(request)
            return
        if options.row is None:
            options.row = index
        check_custom_id(self._ids, options.run, options.custom_id, place)


def check_custom_id(ids: IdIndex | None, run: str | None, custom_id: str, place: str) -> None:
    """Keep the custom_id of a row in a run. Raises InvalidRequest if a row before has it."""
    first = None if ids is None else ids.add("custom_id", f"{run}/{custom_id}", place)
    if first is not None:
        raise invalid(
            f"custom_id: {first} of the file has {custom_id!r} as well: it identifies a row of the "
            "run, so give each its own",
            "custom_id",
        )


def custom_id_of(data: dict[str, Any] | InvalidRequest) -> str | None:
    """The custom_id in a row that may be invalid."""
    if isinstance(data, InvalidRequest):
        return None
    value, job = text_of(data.get("custom_id")), data.get("job")
    if value is None and "body" not in data and isinstance(job, dict):
        value = job.get("custom_id")
    return value if isinstance(value, str) else None


def check_numbers(data: dict[str, Any]) -> None:
    """JSON lacks NaN and infinity: name the column before its value moves into the request."""
    for name, value in data.items():
        if isinstance(value, float) and value != value:
            raise invalid(f"{name}: NaN is not a value: leave it empty (null), or write text", name)
        try:
            check_json(value, name)
        except ValueError as error:
            raise invalid(str(error).replace(name, f"{name}:", 1), name) from None


def without_model(part: str, batch: bool = False) -> InvalidRequest:
    where = "the body of each line" if batch else f"the {part} 'model'"
    return invalid(f"no model is given: name it with --model M, or in {where}", "model")


def in_terms_of_file(
    error: InvalidRequest, origins: Iterable[tuple[str, str, str]]
) -> InvalidRequest:
    """The error with the name of the column, or of the option, instead of a path in the request.
    `origins`: paths in the request, with the columns or options that they are from, as names and
    as text."""
    if error.param is None:
        return error
    for path, param, shown in origins:
        inside = error.param.removeprefix(path)
        if error.param.startswith(path) and (not inside or inside[0] in ".["):
            rest = error.message.removeprefix(error.param)
            if rest != error.message:
                return InvalidRequest(error.code, f"{shown}{inside}{rest}", f"{param}{inside}")
    return error


def _origins(
    data: Mapping[str, Any], overrides: Overrides, part: str
) -> Iterator[tuple[str, str, str]]:
    """For `in_terms_of_file`."""
    columns = {new: old for old, new in overrides.names.items()}
    for name in overrides.fields:
        yield name, name, overrides.option_names.option(name)
    for option in ("run", "tenant", "delay", "priority"):
        if getattr(overrides, option) is not None:
            yield f"job.{option}", option, f"--{option}"
    if overrides.model is not None:
        yield "model", "model", "--model"
    if "body" in data:
        yield "job.custom_id", "custom_id", f"{part} 'custom_id'"
        return
    for name in data:
        column = columns.get(name, name)
        inner = f"metadata.{name}"
        if name in ("custom_id", "target"):
            inner = f"job.{name}"
        elif name in SOURCES[1:]:
            inner = "messages[0].content"
        for path in (name, inner):
            yield path, column, f"{part} {column!r}"


def check_size(size: int) -> None:
    """Raise InvalidRequest for a request of so many bytes that no job holds it."""
    if size > MAX_DATA:
        raise invalid(
            f"the request has {size / 1e6:.1f} MB as JSON, and a job holds at most "
            f"{MAX_DATA / 1e6:.1f} MB: shorten it"
        )


def json_size(request: ChatRequest) -> int:
    """Bytes of a request as JSON in ASCII, as a job has it."""
    try:
        text = request.model_dump_json(exclude_none=True)  # a quarter of the time of json.dumps
    except ValueError:  # a lone surrogate, in a field of free form
        return len(json.dumps(request.to_dict()))
    if text.isascii():
        return len(text)
    ascii_only = len(text.encode("ascii", "ignore"))
    units = len(text.encode("utf-16-le")) // 2
    return ascii_only + len("\\u0000") * (units - ascii_only)


def _request_fields(data: dict[str, Any], overrides: Overrides, part: str) -> dict[str, Any]:
    """Return the fields of the request in a row.

    A line of an OpenAI batch file holds them in `body`. Otherwise `prompt` or `text` becomes the
    user message, `custom_id` and `target` move to `job`, and `task` moves to `metadata`.
    """
    batch = "body" in data
    known = _known(batch)
    kept: dict[str, Any] = {}
    if overrides.keep:
        kept = {name: data[name] for name in data if is_kept(name, known, overrides.keep)}
        data = {name: value for name, value in data.items() if name not in kept}
    unknown = [name for name in data if name not in known]
    if unknown and overrides.ignore_unknown and not batch:
        data = {name: value for name, value in data.items() if name in known}
    if not batch and all(data.get(name) is None for name in SOURCES):
        empty = [one for one in SOURCES if one in data or one in overrides.names.values()]
        if empty:
            raise _empty_source(empty[0], overrides.names, part)
        raise _without_messages(kept, unknown, overrides.option_names)
    check_numbers(data)
    if unknown and not overrides.ignore_unknown:
        raise _unknown(unknown[0], batch, [name for name in overrides.keep if name not in kept])
    fields = _batch_body(data) if batch else _row_fields(data)
    if kept:
        fields["metadata"] = with_kept(mapping_of(fields, "metadata"), kept)
    return fields


@cache
def _known(batch: bool) -> frozenset[str]:
    """The names that a row may have, or a line of a batch file."""
    return frozenset(BATCH_FIELDS if batch else (*ROW_FIELDS, *request_fields()))


def is_kept(name: str, known: Container[str], keep: tuple[str, ...]) -> bool:
    return name in keep or (KEEP_ALL in keep and name not in known)


def with_kept(metadata: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Metadata has only text: other values become JSON, and those that JSON lacks their text."""
    twice = next((name for name in kept if name in metadata), None)
    if twice is not None:
        raise invalid(f"metadata.{twice}: there is also a column {twice!r} to keep", "metadata")
    texts = {
        name: json.dumps(value, default=str) if isinstance(value, JSON) else str(value)
        for name, value in kept.items()
        if value is not None
    }
    return {**metadata, **texts}


def _unknown(name: str, batch: bool, absent: Sequence[str]) -> InvalidRequest:
    """The error of a field that is not known. `absent`: fields to keep that the row lacks."""
    option = quote(name) if name.isprintable() else f"'{KEEP_ALL}'"
    keep = f"--keep {option} keeps it in the results"
    mistyped = get_close_matches(name, absent, 1)
    if mistyped:
        keep += f", and there is no field {mistyped[0]!r} to keep"
        return invalid(f"unknown field {name!r}; {keep}", name)
    if batch:
        return invalid(
            f"unknown field {name!r} in a batch line, which has {', '.join(BATCH_FIELDS)}; {keep}",
            name,
        )
    offered = sorted(set(request_fields()) - {*IGNORED_FIELDS, *REFUSED_FIELDS, "messages"})
    close = get_close_matches(name, ("messages", *ROW_FIELDS, *offered), 1)
    if close:
        return invalid(f"unknown field {name!r}; did you mean '{close[0]}'? ({keep})", name)
    return invalid(
        f"unknown field {name!r}; {keep} (known are messages, {', '.join(ROW_FIELDS)} and the "
        "fields of a request)",
        name,
    )


def _row_fields(data: dict[str, Any]) -> dict[str, Any]:
    fields = {name: _number(value) for name, value in data.items()}
    given = [name for name in SOURCES if fields.get(name) is not None]
    if len(given) > 1:
        raise invalid(f"{given[0]} and {given[1]} exclude each other: give one", given[1])
    for name in SOURCES[1:]:
        content = fields.pop(name, None)
        if content is not None:
            fields["messages"] = [{"role": "user", "content": content}]
    for name, text in (("custom_id", text_of), ("target", target_text)):
        if name in fields:
            fields["job"] = {**mapping_of(fields, "job"), name: text(data[name])}
            del fields[name]
    if "task" in fields:
        fields["metadata"] = {**mapping_of(fields, "metadata"), "task": fields.pop("task")}
    return fields


def _without_messages(
    kept: Mapping[str, Any], unknown: Sequence[str], option_names: OptionNames
) -> InvalidRequest:
    name = next((name for name in SOURCES if name in kept), None)
    hint = f"; {name} is a known field, and --keep {name} only keeps it" if name else ""
    if unknown and not hint:
        named = [*map(repr, unknown[:MAX_NAMED]), *(["…"] if len(unknown) > MAX_NAMED else [])]
        compared = unknown[:MAX_COMPARED]
        close = [found for name in compared for found in get_close_matches(name, SOURCES, 1)]
        meant = f": did you mean {close[0]!r}?" if close else ""
        hint = (
            f", and this one has {', '.join(named)}{meant} "
            f"({option_names.map(unknown[0], 'prompt')} takes {unknown[0]!r} as the prompt)"
        )
    return invalid(f"a row needs messages, prompt or text{hint}", "messages")


def _empty_source(name: str, names: Mapping[str, str], part: str) -> InvalidRequest:
    """The error of a row whose prompt is null or an empty cell. `names`: of --map."""
    column = next((old for old, new in names.items() if new == name), name)
    mapped = f" ({name})" if column != name else ""
    return invalid(
        f"a row needs messages, prompt or text, and its {part} {column!r}{mapped} is empty: fill "
        "it in, or remove the row",
        column,
    )


def _number(value: Any) -> Any:
    """Numbers of typed columns, and whole floats, as pandas writes integers beside nulls, as JSON
    has them."""
    if isinstance(value, list):
        return [_number(item) for item in value]
    if isinstance(value, Decimal):
        value = float(value) if value % 1 else int(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def target_text(value: Any) -> Any:
    """An expected answer, which may be a number: 5.0 is 5, as pandas writes integers beside
    nulls."""
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    return text_of(value)


def text_of(value: Any) -> Any:
    """A key or a text that a typed column holds as an exact number."""
    exact = isinstance(value, int | Decimal) and not isinstance(value, bool)
    return str(value) if exact else value


def _batch_body(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("method", "POST") != "POST":
        raise invalid(f"method: must be POST, got {data['method']!r}", "method")
    if data.get("url", BATCH_URL) != BATCH_URL:
        raise invalid(f"url: must be {BATCH_URL}, got {data['url']!r}", "url")
    body = mapping_of(data, "body")
    return {**body, "job": {**mapping_of(body, "job"), "custom_id": data.get("custom_id")}}


def mapping_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name}: expected an object, got {value!r}", name)
    return value


def _override(fields: dict[str, Any], overrides: Overrides, row: int | None) -> dict[str, Any]:
    fields = {**fields, **overrides.fields}
    job = dict(mapping_of(fields, "job"))
    if overrides.run is not None:
        job = {"priority": "bulk", **job, "run": overrides.run, "row": row}
    for name in ("priority", "tenant", "delay"):
        if (value := getattr(overrides, name)) is not None:
            job[name] = value
    model = fields.get("model") if overrides.model is None else overrides.model
    if model is None:
        return {**fields, "job": job}
    return {**fields, "model": model, "job": job}
