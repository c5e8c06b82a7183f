"""Rows of a Parquet file, or of an Arrow stream, with the values that JSON would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, repeat
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from jobs.data_sets.fields import SOURCES, Row, first_twice
from jobs.errors import InvalidRequest, invalid

BATCH_ROWS = 256  # in memory at once
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # of Arrow's IPC format


def parquet_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """Yield the rows, numbered from 1. Null is a field that is not given, unless it is one of
    SOURCES. `columns`: gets the names of the columns."""
    try:
        source = pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise invalid(f"not a Parquet file that can be read: {error}") from None
    _check_names(source.schema_arrow.names, columns)
    groups = range(source.num_row_groups)
    yield from enumerate(chain.from_iterable(_group_rows(source, one) for one in groups), start=1)


def _group_rows(source: Any, group: int) -> Iterator[dict[str, Any] | InvalidRequest]:
    """The rows of a row group; an InvalidRequest for each that damage of the file hides. Raises
    InvalidRequest for a disk that can't be read."""
    left = source.metadata.row_group(group).num_rows
    try:
        for batch in source.iter_batches(BATCH_ROWS, row_groups=[group]):
            for row in table_rows(batch):
                yield row
                left -= 1
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise invalid(f"the file can't be read: {error.strerror}") from None
        damage = invalid(f"row group {group + 1} of the Parquet file is damaged: {error}")
        yield from repeat(damage, left)


def count(file: IO[bytes]) -> int:
    """Number of rows of a Parquet file. Raises InvalidRequest."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError) as error:
        raise invalid(f"not a Parquet file that can be read: {error}") from None


def arrow_rows(file: IO[bytes], columns: dict[str, None] | None = None) -> Iterator[Row]:
    """The same for a stream of Arrow's IPC format, as data sets of Hugging Face are on disk."""
    tail = _Tail(file)
    try:
        source = pa.ipc.open_stream(pa.PythonFile(tail, mode="r"))
    except (pa.ArrowException, OSError) as error:
        raise invalid(f"not an Arrow file that can be read: {error}") from None
    _check_names(source.schema.names, columns)
    number = 0
    for batch in _batches(source, tail):
        if isinstance(batch, str):
            raise invalid(
                f"the Arrow stream is damaged or cut off after row {number}, and no row behind it "
                f"can be read: {batch}"
            )
        for row in table_rows(batch):
            number += 1
            yield number, row


def arrow_count(file: IO[bytes]) -> int:
    """Number of rows of an Arrow stream; of a damaged one, of those before the damage."""
    rows = 0
    with suppress(pa.ArrowException, OSError):
        for batch in pa.ipc.open_stream(pa.PythonFile(_Tail(file), mode="r")):
            rows += batch.num_rows
    return rows


def _batches(source: Any, tail: _Tail) -> Iterator[Any]:
    """The record batches of an Arrow stream; last why there are no more, if the stream does not
    end."""
    try:
        for batch in source:
            batch.validate()
            yield batch
    except (pa.ArrowException, OSError) as error:
        yield " ".join(str(error).split())
        return
    if tail.last != END_OF_STREAM:
        yield "the mark of its end is missing"


class _Tail:
    """A file, and the last bytes that were read of it. pyarrow does not close it."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.last = file, b""

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.last = (self.last + data)[-len(END_OF_STREAM) :]
        return data

    def close(self) -> None:
        """The file belongs to the caller."""


def _check_names(names: Sequence[str], columns: dict[str, None] | None) -> None:
    twice = first_twice(names)
    if twice is not None:
        raise invalid(f"the file has two columns {twice!r}")
    if columns is not None:
        columns.update(dict.fromkeys(names))


def table_rows(table: Any) -> Iterator[dict[str, Any] | InvalidRequest]:
    """Yield the rows of an Arrow table or record batch, whose columns have different names."""
    names = table.schema.names
    cells = [_values(name, table.column(name)) for name in names]
    for values in zip(*cells, strict=True):
        bad = next((value for value in values if isinstance(value, InvalidRequest)), None)
        given = zip(names, values, strict=True)
        yield bad or {name: one for name, one in given if one is not None or name in SOURCES}


def _values(name: str, column: Any) -> list[Any]:
    """The values of a column; an InvalidRequest for each that can't be read."""
    try:
        return [_plain(value, column.type) for value in column.to_pylist()]
    except (ValueError, ArithmeticError, LookupError):
        return [_value(name, scalar) for scalar in column]


def _value(name: str, scalar: Any) -> Any:
    try:
        return _plain(scalar.as_py(), scalar.type)
    except UnicodeDecodeError as error:
        fact = f"not UTF-8 text: {error.reason} at byte {error.start}"
    except ArithmeticError:
        fact = f"a value of type {scalar.type} is out of range"
    except (ValueError, LookupError) as error:
        zone = getattr(scalar.type, "tz", None)
        unread = f"a value of type {scalar.type} can't be read: {error}"
        fact = unread if zone is None else f"unknown time zone {zone!r}"
    return invalid(f"column {name!r}: {fact}", name)


def _plain(value: Any, kind: Any) -> Any:
    """A value as a row of JSON has it: maps are objects, and objects have no null fields."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        names = [name for name, _ in value]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"it has the key {twice!r} twice")
        items = ((name, _plain(item, kind.item_type)) for name, item in value)
        return {name: item for name, item in items if item is not None}
    if pa.types.is_struct(kind):
        fields = ((field.name, _plain(value[field.name], field.type)) for field in kind)
        return {name: item for name, item in fields if item is not None}
    if isinstance(value, list):
        return [_plain(item, kind.value_type) for item in value]
    return value
