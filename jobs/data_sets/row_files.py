"""Files of rows: JSONL, CSV, TSV, Parquet and Arrow streams, plain or compressed with gzip or zstd.

They are read as a stream, several times if need be. Compression, Parquet and Arrow are found by the
first bytes, the text formats by the suffix of the name.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Self

from jobs.data_sets.compressed import compression_of, decompressed
from jobs.data_sets.fields import Row, mapped_twice
from jobs.data_sets.text_rows import csv_rows, json_rows, lines_of
from jobs.errors import InvalidRequest, invalid

HEAD_BYTES = 16
CONTENT_BYTES = 2**20  # read at once
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
                lines_of(file), self._names, self.columns, tabs=self._suffix != ".csv"
            )
        else:
            yield from self._all_renamed(json_rows(lines_of(file)))

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
        elif self._arrow:
            lines = arrow_count(self._opened())
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
        return renamed if len(renamed) == len(data) else mapped_twice(data, self._names)


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


def parquet_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file. `columns`: gets the names of its columns."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.parquet_rows(file, columns)


def arrow_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """Yield the rows of an Arrow stream. `columns`: gets the names of its columns."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.arrow_rows(file, columns)


def arrow_count(file: IO[bytes]) -> int:
    """Number of rows of an Arrow stream that can be read."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.arrow_count(file)


def parquet_count(file: IO[bytes]) -> int:
    """Number of rows of a Parquet file. Raises InvalidRequest."""
    from jobs.data_sets import parquet_rows

    return parquet_rows.count(file)
