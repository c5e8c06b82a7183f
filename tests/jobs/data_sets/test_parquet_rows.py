"""Columns of Parquet files and the requests that they become."""

from __future__ import annotations

import errno
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data_sets.parquet_rows import arrow_rows
from jobs.data_sets.requests import InvalidLine, Overrides, read_requests
from jobs.data_sets.row_files import RowFile
from jobs.errors import InvalidRequest


def requests_of(path: Path, columns: dict[str, pa.Array], *keep: str) -> list[Any]:
    """The request of each row, or its error as it is printed."""
    pq.write_table(pa.table(columns), path / "rows.parquet")
    with (path / "rows.parquet").open("rb") as file:
        rows = RowFile(file, file.name)
        return [
            f"row {line.number}: {line.sentence}" if isinstance(line, InvalidLine) else line.request
            for line in read_requests(rows, Overrides("m", keep=keep))
        ]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            pa.array([0, 10**18], pa.timestamp("ms")),
            "a value of type timestamp[ms] is out of range",
        ),
        (pa.array([0, 10**7], pa.date32()), "a value of type date32[day] is out of range"),
        (pa.array([0, 10**18], pa.duration("s")), "a value of type duration[s] is out of range"),
        (
            pa.array([b"a", b"\xff"]).view(pa.string()),
            "not UTF-8 text: invalid start byte at byte 0",
        ),
        (pa.array([None, 1], pa.timestamp("s", "Mars/Base")), "unknown time zone 'Mars/Base'"),
    ],
    ids=["timestamp", "date", "duration", "text", "zone"],
)
def test_a_value_that_python_cannot_hold_is_named(
    tmp_path: Path, column: pa.Array, message: str
) -> None:
    columns = {"prompt": pa.array(["a", "b"]), "when": column}
    first, second = requests_of(tmp_path, columns, "when")
    assert first.messages[0].text == "a"
    assert second == f"row 2: column 'when': {message}"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with (
        (tmp_path / "rows.parquet").open("rb") as file,
        pytest.raises(InvalidRequest, match="the file has two columns 'prompt'"),
    ):
        list(RowFile(file, file.name))


def test_typed_columns_become_the_values_of_json(tmp_path: Path) -> None:
    metadata = pa.array([[("level", "easy"), ("none", None)]], pa.map_(pa.string(), pa.string()))
    columns = {
        "prompt": pa.array(["a"]),
        "temperature": pa.array([Decimal("0.50")]),
        "max_tokens": pa.array([64.0]),
        "seed": pa.array([Decimal(7)]),
        "custom_id": pa.array([12]),
        "target": pa.array([42]),
        "metadata": metadata,
        "price": pa.array([Decimal("19.90")]),
    }
    (request,) = requests_of(tmp_path, columns, "price")
    assert (request.temperature, request.max_tokens, request.seed) == (0.5, 64, 7)
    assert (request.job.custom_id, request.job.target) == ("12", "42")
    assert request.metadata == {"level": "easy", "price": "19.90"}


def test_a_fraction_stays_invalid_where_an_integer_is_meant(tmp_path: Path) -> None:
    columns = {"prompt": pa.array(["a"]), "max_tokens": pa.array([1.5])}
    (error,) = requests_of(tmp_path, columns)
    assert error == "row 1: field 'max_tokens': expected an integer, got 1.5"


def test_rows_of_a_damaged_row_group_are_errors_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    table = pa.table({"prompt": [f"row {number}" for number in range(90)]})
    pq.write_table(table, path, row_group_size=30, use_dictionary=False, write_statistics=False)
    begin = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[begin : begin + 60] = bytes(60)
    path.write_bytes(content)
    with path.open("rb") as file:
        rows = dict(RowFile(file, file.name))
    bad = [number for number, row in rows.items() if isinstance(row, InvalidRequest)]
    assert bad == [*range(31, 61)] and len(rows) == 90
    assert rows[61] == {"prompt": "row 60"}
    error = rows[31]
    assert isinstance(error, InvalidRequest)
    assert error.message.startswith("row group 2 of the Parquet file is damaged: ")


def test_a_page_with_another_checksum_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_statistics": False}
    pq.write_table(pa.table({"prompt": ["aaaa"]}), path, write_page_checksum=True, **options)
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"aaab", 1))
    with path.open("rb") as file:
        ((_, row),) = RowFile(file, file.name)
    assert isinstance(row, InvalidRequest), row


def test_an_error_of_the_disk_ends_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "rows.parquet")
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", failing)
    with (
        (tmp_path / "rows.parquet").open("rb") as file,
        pytest.raises(InvalidRequest, match="the file can't be read: Input/output error"),
    ):
        list(RowFile(file, file.name))


def test_a_stream_that_is_cut_off_anywhere_names_the_last_row_before_it() -> None:
    table = pa.table({"prompt": [f"word {n}" for n in range(30)]})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    whole = sink.getvalue()
    first = len(pa.ipc.read_schema(pa.BufferReader(whole)).serialize())
    for length in range(first, len(whole)):
        rows = []
        with pytest.raises(InvalidRequest, match="damaged or cut off after row") as raised:
            for row in arrow_rows(io.BytesIO(whole[:length])):
                rows.append(row)
        assert f"after row {len(rows)}, " in raised.value.message
        assert rows == [(n + 1, {"prompt": f"word {n}"}) for n in range(len(rows))]
    assert len([*arrow_rows(io.BytesIO(whole))]) == 30


def test_rows_of_a_stream_are_counted_up_to_a_break() -> None:
    table = pa.table({"prompt": ["two\nlines"] * 30})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    whole = sink.getvalue()
    for content, rows in ((whole, 30), (whole[:-60], 20), (whole[:200], 0)):
        assert RowFile(io.BytesIO(content), "rows.arrow").content()[1] == rows
