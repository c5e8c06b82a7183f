"""Files of rows: JSONL, CSV and Parquet, by the suffix of the name.

They are read as a stream, several times if need be.
"""

from __future__ import annotations

import codecs
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from jobs.api.wire import describe, not_json
from jobs.cli.fields import field_value, request_fields
from jobs.client.rq_format import MAX_DATA
from jobs.errors import InvalidRequest, invalid

Row = tuple[int, dict[str, Any] | InvalidRequest]  # number from 1; the error of a row without data


class RowFile:
    """The rows of an open file. What can't be read twice, such as a pipe, is copied to the disk."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        suffix = Path(name).suffix.lower()
        self.name = name
        self.unit = "row" if suffix == ".parquet" else "line"
        self._read = {".csv": csv_rows, ".parquet": parquet_rows}.get(suffix, json_rows)
        self._file = file if file.seekable() else _copied(file)
        self._start = self._file.tell()

    def __iter__(self) -> Iterator[Row]:
        self._file.seek(self._start)
        return self._read(self._file)


def _copied(file: IO[bytes]) -> IO[bytes]:
    copy: IO[bytes] = TemporaryFile()  # noqa: SIM115 - it lives as long as the rows
    shutil.copyfileobj(file, copy)
    copy.seek(0)
    return copy


def json_rows(lines: IO[bytes] | list[bytes]) -> Iterator[Row]:
    """Yield the objects of JSONL. Blank lines are skipped."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, _object(line)
            except InvalidRequest as error:
                yield number, error


def _object(line: bytes) -> dict[str, Any]:
    try:
        data = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except (ValueError, RecursionError) as error:
        raise invalid(not_json(error)) from None
    if isinstance(data, list):
        raise invalid("expected a JSON object, got an array: write each request on its own line")
    if not isinstance(data, dict):
        raise invalid(f"expected a JSON object, got {describe(data)}")
    return data


def csv_rows(file: IO[bytes]) -> Iterator[Row]:
    """Yield the rows of CSV in UTF-8 with a header. An empty cell is a field that is not given.

    A cell of a request's field or of `body` is JSON, or else a string, like the values of -o. All
    other cells are text. Blank lines are skipped. The number of a row is that of its first line.
    """
    csv.field_size_limit(MAX_DATA)
    reader = csv.reader(_text_lines(file), strict=True)
    parsed = frozenset((*request_fields(), "body"))
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield number, invalid(f"not CSV: {error}; the rest of the file is not checked")
            return
        except UnicodeDecodeError as error:
            yield reader.line_num + 1, _not_utf8(error)
            return
        if header is None:
            if not any(map(str.strip, cells)):
                continue
            header = cells
            twice = next((name for name in cells if cells.count(name) > 1), None)
            if twice is not None:
                yield number, invalid(f"the header has two columns {twice!r}")
                return
        elif cells and len(cells) != len(header):
            yield number, invalid(f"{len(cells)} cells, but the header has {len(header)}")
        elif cells:
            given = {name: cell for name, cell in zip(header, cells, strict=True) if cell}
            yield (
                number,
                {
                    name: field_value(name, cell) if name in parsed else cell
                    for name, cell in given.items()
                },
            )


def parquet_rows(file: IO[bytes]) -> Iterator[Row]:
    """Yield the rows of a Parquet file."""
    from jobs.cli import parquet_rows

    return parquet_rows.parquet_rows(file)


def _text_lines(file: IO[bytes]) -> Iterator[str]:
    """The lines of a text file, however they end: LF, CR LF or CR."""
    encoding = "utf-8-sig"
    for chunk in file:
        for line in chunk.splitlines(keepends=True):
            yield line.decode(encoding)
            encoding = "utf-8"


def _not_utf8(error: UnicodeDecodeError) -> InvalidRequest:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return invalid("not UTF-8 text: the file is UTF-16: save it as UTF-8")
    fact = f"{error.reason} at byte {error.start}"
    return invalid(f"not UTF-8 text: {fact}: save the file as UTF-8")
