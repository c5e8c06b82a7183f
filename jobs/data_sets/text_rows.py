"""The rows of text: JSONL, CSV and TSV in UTF-8, whatever ends a line."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import IO, Any, NamedTuple

from jobs.api.wire import describe, not_json
from jobs.data_sets.fields import (
    SOURCES,
    Row,
    field_value,
    first_twice,
    mapped_twice,
    request_fields,
)
from jobs.encoding import DuplicateKey, parse_written
from jobs.errors import InvalidRequest, invalid
from jobs.sizes import counted
from jobs.store.rq_layout import MAX_DATA

MAX_LINE = 2 * MAX_DATA  # bytes; a job holds MAX_DATA


class LongLine(NamedTuple):
    """A line of more than MAX_LINE bytes, which is read and not kept. quotes: number of them."""

    quotes: int


Line = bytes | LongLine


def lines_of(file: IO[bytes]) -> Iterator[Line]:
    """The lines of a text file, however they end: LF, CR LF or CR."""
    rest = b""  # a line whose end is not read yet
    quotes: int | None = None  # of the part of it that is dropped
    while chunk := file.readline(MAX_LINE + 1):
        lines = (rest + chunk).splitlines(keepends=True)
        rest = b"" if chunk.endswith(b"\n") else lines.pop()
        for line in lines:
            yield _checked(line, quotes)
            quotes = None
        if len(rest) > MAX_LINE:
            # A CR at its end may be the first half of a line end.
            kept = rest[-1:] if rest.endswith(b"\r") else b""
            rest, quotes = kept, (quotes or 0) + rest.count(b'"')
    if rest or quotes is not None:
        yield _checked(rest, quotes)


def _checked(line: bytes, quotes: int | None) -> Line:
    """A line, or what is left of one that is too long. `quotes`: in its first part, if it was
    dropped."""
    if quotes is None and len(line) <= MAX_LINE:
        return line
    return LongLine((quotes or 0) + line.count(b'"'))


def _too_long() -> InvalidRequest:
    return invalid(
        f"the line has more than {MAX_LINE / 1e6:.0f} MB, and a job holds at most "
        f"{MAX_DATA / 1e6:.1f} MB: shorten it, or write each row on a line of its own"
    )


def json_rows(lines: Iterable[Line]) -> Iterator[Row]:
    """Yield the objects of JSONL. Blank lines are skipped."""
    numbered = (
        (number, line)
        for number, line in enumerate(lines, start=1)
        if isinstance(line, LongLine) or line.strip()
    )
    first = True
    for number, line in numbered:
        try:
            yield number, _object(line)
        except InvalidRequest as error:
            second = next(numbered, None) if first and _is_open(line) else None
            array = isinstance(line, bytes) and line.strip() == b"["
            if second is not None and (array or not _is_object(second[1])):
                yield number, _pretty_printed()
                return
            yield number, _not_json_lines(error, line, first)
            if second is not None:  # the first line alone is cut off
                yield second[0], _object(second[1])
        first = False


def _pretty_printed() -> InvalidRequest:
    return invalid(
        "not JSON in one line: the file has JSON over several lines (pretty-printed): write each "
        "object on a line of its own (JSONL), as jq -c '.[]' does with an array"
    )


def _not_json_lines(error: InvalidRequest, line: Line, first: bool) -> InvalidRequest:
    """The error of a line; of the first one with what the file may be instead."""
    if isinstance(line, LongLine) or not first or not error.message.startswith("not JSON"):
        return error
    if line.removeprefix(codecs.BOM_UTF8).lstrip()[:1] in b"{[":
        return error
    return invalid(
        f"{error.message}; a row is a JSON object, and other files are known by their names: .csv, "
        ".tsv"
    )


def _is_open(line: Line) -> bool:
    """True if JSON begins in a line and does not end there."""
    if isinstance(line, LongLine):
        return False
    try:
        text = line.decode("utf-8-sig").strip()
        json.loads(text)
    except json.JSONDecodeError as error:
        return text.startswith(("{", "[")) and error.pos >= len(text)
    except (ValueError, RecursionError):
        return False
    return False


def _is_object(line: Line) -> bool:
    try:
        _object(line)
    except InvalidRequest:
        return False
    return True


def _object(line: Line) -> dict[str, Any]:
    if isinstance(line, LongLine):
        raise _too_long()
    try:
        data, duplicate = parse_written(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except (ValueError, RecursionError) as error:
        raise invalid(not_json(error)) from None
    if isinstance(data, list):
        raise invalid(
            "expected a JSON object, got an array: write each object on a line of its own, as "
            "jq -c '.[]' does"
        )
    if not isinstance(data, dict):
        raise invalid(f"expected a JSON object, got {describe(data)}")
    if duplicate is not None:
        name = duplicate.path[0]
        raise invalid(duplicate.at(f"field {name!r}", skipped=1), str(name))
    return data


def csv_rows(
    lines: Iterable[Line],
    names: Mapping[str, str] | None = None,
    columns: dict[str, None] | None = None,
    *,
    tabs: bool = False,
) -> Iterator[Row]:
    """Yield the rows of CSV in UTF-8 with a header; of TSV with `tabs`. An empty cell is a field
    that is not given, or null if it is one of SOURCES. `names`: fields of a row by the names of
    their columns. `columns`: gets the names in the header.

    A cell of a request's field or of `body` is JSON, or else a string, like the values of -o. All
    other cells are text. Blank lines are skipped. The number of a row is that of its first line.
    """
    csv.field_size_limit(MAX_DATA)
    faults: dict[int, InvalidRequest] = {}  # by line, of the row that is read
    reader = csv.reader(_text_lines(lines, faults), strict=True, delimiter="\t" if tabs else ",")
    found: list[str] = []  # names in the header
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on behind the line where it found that
            faults.clear()
            hint = ": a quote in this row is not closed" if "end of data" in str(error) else ""
            yield number, invalid(f"not {'TSV' if tabs else 'CSV'}: {error}{hint}")
            if header is None:
                return
            continue
        if faults:
            line, fault = next(iter(faults.items()))
            faults.clear()
            yield line, fault
            if header is None:
                return
            continue
        if header is None:
            if not any(map(str.strip, cells)):
                continue
            found, header = cells, [(names or {}).get(name, name) for name in cells]
            wrong = _wrong_header(cells, header, names or {}, tabs)
            if wrong is not None:
                yield number, wrong
                return
            if columns is not None:
                columns.update(dict.fromkeys(cells))
        elif cells and len(cells) != len(header):
            has = counted(len(cells), "cell")
            yield number, invalid(f"{has}, but the header has {len(header)}")
        elif cells:
            yield number, _fields(found, header, cells)


def _fields(
    columns: list[str], names: list[str], cells: list[str]
) -> dict[str, Any] | InvalidRequest:
    """A row of CSV. `names`: what the `columns` hold."""
    fields: dict[str, Any] = {}
    for column, name, cell in zip(columns, names, cells, strict=True):
        try:
            if cell or name in SOURCES:
                parsed = name in _json_columns() and bool(cell)
                fields[name] = field_value(name, cell) if parsed else cell or None
        except DuplicateKey as error:
            return invalid(error.at(f"column {column!r}"), column)
    return fields


@cache
def _json_columns() -> frozenset[str]:
    return frozenset((*request_fields(), "body"))


def _wrong_header(
    cells: list[str], header: list[str], names: Mapping[str, str], tabs: bool
) -> InvalidRequest | None:
    twice = first_twice(cells)
    if twice is not None:
        return invalid(f"the header has two columns {twice!r}")
    if len(set(header)) < len(header):
        return mapped_twice(cells, names)
    if cells[0].lstrip().startswith("{"):
        return invalid("the header is a JSON object: name a file of such lines .jsonl")
    found = {
        ";": f"';': save the file with {'tabs' if tabs else 'commas'}",
        "," if tabs else "\t": "commas: name the file .csv" if tabs else "tabs: name the file .tsv",
    }
    other = next((one for one in found if one in cells[0]), None) if len(cells) == 1 else None
    return invalid(f"the columns are separated by {found[other]}") if other else None


def _text_lines(lines: Iterable[Line], faults: dict[int, InvalidRequest]) -> Iterator[str]:
    """The texts of lines. `faults`: gets those that are not UTF-8 or too long, by their numbers. A
    line that is too long leaves the quote open or closed, as it has found or changed it."""
    encoding = "utf-8-sig"
    for number, line in enumerate(lines, start=1):
        try:
            if isinstance(line, LongLine):
                faults[number] = _too_long()
                yield '"\n' if line.quotes % 2 else "\n"
            else:
                yield line.decode(encoding)
        except UnicodeDecodeError as error:
            faults[number] = _not_utf8(error)
            assert isinstance(line, bytes)
            yield line.decode(encoding, "replace")
        encoding = "utf-8"


def _not_utf8(error: UnicodeDecodeError) -> InvalidRequest:
    fact = f"{error.reason} at byte {error.start}"
    return invalid(f"not UTF-8 text: {fact}: save the file as UTF-8")
