"""Files of rows: JSONL, CSV, TSV, Parquet and Arrow streams, plain or compressed with gzip or zstd.

They are read as a stream, several times if need be. Compression, Parquet and Arrow are found by the
first bytes, the text formats by the suffix of the name.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

from jobs.api.wire import describe, not_json
from jobs.data_sets.compressed import compression_of, decompressed
from jobs.data_sets.fields import SOURCES, field_value, first_twice, request_fields
from jobs.encoding import DuplicateKey, parse_written
from jobs.errors import InvalidRequest, invalid
from jobs.sizes import counted
from jobs.store.rq_layout import MAX_DATA

Row = tuple[int, dict[str, Any] | InvalidRequest]  # number from 1; the error of a row without data

HEAD_BYTES = 16
CONTENT_BYTES = 2**20  # read at once
MAX_LINE = 2 * MAX_DATA  # bytes; a job holds MAX_DATA
PARQUET = b"PAR1"
ARROW_STREAM = b"\xff\xff\xff\xff"
PARQUET_SUFFIXES = (".parquet", ".pq")
TSV_SUFFIXES = (".tsv", ".tab")
# Other formats by their first bytes, and what to do.
FOREIGN = {
    b"PK\x03\x04": "a zip archive, as spreadsheets (.xlsx) are: unpack it, or export it as CSV",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet (.xls): export it as CSV",
    b"ARROW1": "an Arrow file (Feather): write it as Parquet",
    b"Obj\x01": "an Avro file: write it as Parquet",
    b"SQLite format 3": "an SQLite database: export the table as CSV",
    codecs.BOM_UTF16_LE: "text in UTF-16: save it as UTF-8",
    codecs.BOM_UTF16_BE: "text in UTF-16: save it as UTF-8",
}


class RowFile:
    """The rows of an open file. A pipe, or another file that can't be read twice, is copied to the
    disk; the context deletes the copy.

    `names`: fields of a row by the names of the columns that hold them. `columns`: the names that
    were found in what was read, if there are `names`. Raises InvalidRequest for a format that can't
    be read.
    """

    def __init__(self, file: IO[bytes], name: str, names: Mapping[str, str] | None = None) -> None:
        self.name, self._names = name, names or {}
        self.columns: dict[str, None] = {}  # in their order
        self._copies = ExitStack()
        self._file = file if file.seekable() else self._copied(file)
        self._start = self._file.tell()
        self._compression = compression_of(self._file.read(HEAD_BYTES))
        path = Path(name)
        self._suffix = Path(path.stem if self._compression else name).suffix.lower()
        head = self._head()
        self._digest, self._stamp = "", self._stamp_now()  # of the content that was digested
        self._parquet = head.startswith(PARQUET)
        self._arrow = head.startswith(ARROW_STREAM)
        if self._parquet and self._compression:  # its reader goes to and fro
            self._file, self._start, self._compression = self._copied(self._opened()), 0, None
        _refuse_foreign(head, self._suffix)
        binary = self._parquet or self._arrow
        self.unit = "row" if binary else "line"
        self._is_csv = not binary and self._suffix in (".csv", *TSV_SUFFIXES)
        self.part = "column" if binary or self._is_csv else "field"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._copies.close()

    def __iter__(self) -> Iterator[Row]:
        file = self._opened()
        if self._parquet:
            yield from self._all_renamed(parquet_rows(file, self.columns))
        elif self._arrow:
            yield from self._all_renamed(arrow_rows(file, self.columns))
        elif self._is_csv:
            yield from csv_rows(
                _lines(file), self._names, self.columns, tabs=self._suffix != ".csv"
            )
        else:
            yield from self._all_renamed(json_rows(_lines(file)))

    def content(self) -> tuple[str, int]:
        """A digest of the content, without its compression, and about how many rows it has: its
        lines, without the header of CSV and TSV. Raises InvalidRequest for damaged compressed
        data."""
        self._stamp = self._stamp_now()
        file, lines, last = self._opened(), 0, b""
        digest = hashlib.blake2b(digest_size=16)
        while chunk := file.read(CONTENT_BYTES):
            digest.update(chunk)
            lines, last = lines + chunk.count(b"\n"), chunk
        lines += bool(last) and not last.endswith(b"\n")
        if self._parquet:
            lines = parquet_count(self._opened())
        elif self._is_csv:
            lines = max(0, lines - 1)
        self._digest = digest.hexdigest()
        return self._digest, lines

    def has_changed(self) -> bool:
        """True if the content is another one than at the call of `content` before. The rows must
        not be read meanwhile."""
        before = self._digest
        return self._stamp_now() != self._stamp and self.content()[0] != before

    def _stamp_now(self) -> tuple[int, int] | None:
        """Changes when the file is written to; None for a file in memory."""
        try:
            found = os.fstat(self._file.fileno())
        except OSError:
            return None
        return found.st_size, found.st_mtime_ns

    def _head(self) -> bytes:
        return self._opened().read(HEAD_BYTES)

    def _opened(self) -> IO[bytes]:
        self._file.seek(self._start)
        return decompressed(self._file, self._compression) if self._compression else self._file

    def _copied(self, file: IO[bytes]) -> IO[bytes]:
        copy = self._copies.enter_context(TemporaryFile())  # noqa: SIM115 - a false alarm
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        return copy

    def _all_renamed(self, rows: Iterable[Row]) -> Iterator[Row]:
        for number, data in rows:
            yield number, data if isinstance(data, InvalidRequest) else self._renamed(data)

    def _renamed(self, data: dict[str, Any]) -> dict[str, Any] | InvalidRequest:
        if self._names:
            self.columns.update(dict.fromkeys(data))
        renamed = {self._names.get(name, name): value for name, value in data.items()}
        return renamed if len(renamed) == len(data) else _twice(data, self._names)


@contextmanager
def opened_rows(path: Path, names: Mapping[str, str]) -> Iterator[RowFile]:
    """The rows of a file, which is open in the context. Raises InvalidRequest, with the path, for a
    format that can't be read."""
    with path.open("rb") as file:
        try:
            rows = RowFile(file, str(path), names)
        except InvalidRequest as error:
            raise invalid(f"{path}: {error.message}") from None
        with rows:
            yield rows


def _refuse_foreign(head: bytes, suffix: str) -> None:
    for begin, what in FOREIGN.items():
        if head.startswith(begin):
            raise invalid(f"the file is {what}")
    if suffix in PARQUET_SUFFIXES and not head.startswith(PARQUET):
        if not head:
            raise invalid("the file is empty")
        raise invalid(
            "the file is not Parquet, which begins with PAR1: name CSV .csv, tab-separated text "
            ".tsv, and JSON objects, one per line, .jsonl"
        )


class LongLine(NamedTuple):
    """A line of more than MAX_LINE bytes, which is read and not kept. quotes: number of them."""

    quotes: int


Line = bytes | LongLine


def _lines(file: IO[bytes]) -> Iterator[Line]:
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
        return _twice(cells, names)
    if cells[0].lstrip().startswith("{"):
        return invalid("the header is a JSON object: name a file of such lines .jsonl")
    found = {
        ";": f"';': save the file with {'tabs' if tabs else 'commas'}",
        "," if tabs else "\t": "commas: name the file .csv" if tabs else "tabs: name the file .tsv",
    }
    other = next((one for one in found if one in cells[0]), None) if len(cells) == 1 else None
    return invalid(f"the columns are separated by {found[other]}") if other else None


def _twice(columns: Iterable[str], names: Mapping[str, str]) -> InvalidRequest:
    columns = list(columns)
    new = [names.get(name, name) for name in columns]
    field = str(first_twice(new))
    both = " and ".join(repr(name) for name in columns if names.get(name, name) == field)
    return invalid(f"the columns {both} are both {field!r}: use another --map", field)


def parquet_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file. `columns`: gets the names of its columns."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.parquet_rows(file, columns)


def arrow_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """Yield the rows of an Arrow stream. `columns`: gets the names of its columns."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.arrow_rows(file, columns)


def parquet_count(file: IO[bytes]) -> int:
    """Number of rows of a Parquet file. Raises InvalidRequest."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.count(file)


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
