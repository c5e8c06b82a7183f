"""JSONL, CSV and Parquet files as rows."""

from __future__ import annotations

import io
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data_sets import text_rows
from jobs.data_sets.fields import first_twice
from jobs.data_sets.row_files import RowFile
from jobs.errors import InvalidRequest


def csv_of(text: str | bytes) -> list[Any]:
    """Numbers and data of a CSV file; of an invalid row the message."""
    content = text.encode() if isinstance(text, str) else text
    return [
        (number, data.message if isinstance(data, InvalidRequest) else data)
        for number, data in RowFile(io.BytesIO(content), "rows.csv")
    ]


def test_csv_parses_fields_of_a_request_and_no_other_cell() -> None:
    header = "prompt,target,custom_id,temperature,stop,seed,user,level"
    (row,) = csv_of(f'{header}\n12,007,1,0.5,"[""a""]",,3,010\n')
    assert row == (
        2,
        {
            "prompt": "12",
            "target": "007",
            "custom_id": "1",
            "temperature": 0.5,
            "stop": ["a"],
            "user": "3",
            "level": "010",
        },
    )


def test_csv_takes_what_spreadsheets_write() -> None:
    rows = csv_of('\ufeffprompt,target\r\n"two\nlines, ""quoted""",a\r\n\r\nnext,b\r\n')
    assert rows == [
        (2, {"prompt": 'two\nlines, "quoted"', "target": "a"}),
        (5, {"prompt": "next", "target": "b"}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_jsonl_takes_each_kind_of_line_end(end: str) -> None:
    content = end.join(['{"prompt": "a"}', "", "{", '{"prompt": "b\\r"}'])
    (first, second, third) = RowFile(io.BytesIO(content.encode()), "rows.jsonl")
    assert (first, third) == ((1, {"prompt": "a"}), (4, {"prompt": "b\r"}))
    assert second[0] == 3 and isinstance(second[1], InvalidRequest)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lines_are_too_long_and_not_files_whatever_ends_the_lines(
    monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(text_rows, "MAX_LINE", 100)
    line = b'{"prompt": "' + b"a" * 60 + b'"}'
    rows = list(RowFile(io.BytesIO(end.join([line] * 3)), "rows.jsonl"))
    assert [number for number, _ in rows] == [1, 2, 3]
    assert not any(isinstance(data, InvalidRequest) for _, data in rows)
    content = end.join([b"{}", b"a" * 101, b"{}"])
    first, bad, last = RowFile(io.BytesIO(content), "rows.jsonl")
    assert (first, last) == ((1, {}), (3, {}))
    assert isinstance(bad[1], InvalidRequest) and "the line has more than" in bad[1].message


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r", b""])
@pytest.mark.parametrize("size", [101, 201, 202, 203, 1000])
def test_a_line_of_any_length_costs_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, end: bytes, size: int
) -> None:
    monkeypatch.setattr(text_rows, "MAX_LINE", 100)
    rest = end + b'{"a": 1}' + end if end else b""
    for content in (b"{}\n" + b"a" * size + rest, b"{}\r" + b'"' * size + rest):
        rows = list(RowFile(io.BytesIO(content), "rows.jsonl"))
        numbers = [number for number, data in rows if isinstance(data, InvalidRequest)]
        assert ([number for number, _ in rows], numbers) == ([1, 2, 3] if end else [1, 2], [2])
    for field in (b"b" * size, b'"' + b"b" * size + b'"', b'"b\n' + b"b" * size + b'",""\n'):
        rows = list(RowFile(io.BytesIO(b"prompt\na\n" + field + (end or b"\n") + b"c\n"), "a.csv"))
        good = [data["prompt"] for _, data in rows if not isinstance(data, InvalidRequest)]
        assert good == ["a", "c"]


def test_csv_takes_each_kind_of_line_end() -> None:
    for end in ("\n", "\r\n", "\r"):
        assert csv_of(end.join(["prompt,target", "a,b", '"c\nd",e', "f,g", ""])) == [
            (2, {"prompt": "a", "target": "b"}),
            (3, {"prompt": "c\nd", "target": "e"}),
            (5, {"prompt": "f", "target": "g"}),
        ]


@pytest.mark.parametrize("blank", ["\n", "\r\n\n", "  \n", ",\n"])
def test_blank_lines_before_the_header_are_skipped(blank: str) -> None:
    ((number, row),) = csv_of(f"{blank}prompt,target\na,b\n")
    assert number == blank.count("\n") + 2
    assert row == {"prompt": "a", "target": "b"}


def test_csv_cells_of_stop_are_text_unless_they_are_a_list_and_bodies_are_json() -> None:
    rows = csv_of('stop,tool_choice\n2,none\ntrue,auto\n"[""2""]",\n"""2""",\n')
    assert [row["stop"] for _, row in rows] == ["2", "true", ["2"], "2"]
    ((_, row),) = csv_of('custom_id,body\n1,"{""model"": ""m""}"\n')
    assert row == {"custom_id": "1", "body": {"model": "m"}}


def test_csv_takes_long_cells() -> None:
    ((_, row),) = csv_of("prompt\n" + "a" * 500_000)
    assert len(row["prompt"]) == 500_000


@pytest.mark.parametrize(
    ("text", "number", "message"),
    [
        ("prompt,target\na\n", 2, "1 cell, but the header has 2"),
        ("prompt,prompt\na,b\n", 1, "the header has two columns 'prompt'"),
        ('prompt\n"a\n', 2, "not CSV: unexpected end of data"),
        (b"prompt\nok\n\xff\n", 3, "not UTF-8 text"),
        (b"prompt\nok\n\xff\n", 3, "save the file as UTF-8"),
    ],
)
def test_csv_that_is_broken_is_named(text: str | bytes, number: int, message: str) -> None:
    line, error = csv_of(text)[-1]
    assert line == number
    assert message in error


def test_names_of_many_columns_are_compared_once() -> None:
    """And not each with each other one: that would be hours."""
    compared = 0

    class Name(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = [Name(f"c{number}") for number in range(10_000)]
    assert first_twice(names) is None
    assert first_twice([*names, Name("c7")]) == "c7"
    assert compared < 5 * len(names)


def test_csv_goes_on_behind_a_row_that_can_not_be_read() -> None:
    rows = csv_of(b'prompt,target\na,1\nb\xff,2\nc,3\n"d"x,4\n"e\n\xff",5\nf,6\n')
    assert [(line, one["prompt"]) for line, one in rows if isinstance(one, dict)] == [
        (2, "a"),
        (4, "c"),
        (8, "f"),
    ]
    faults = [(line, one.partition(":")[0]) for line, one in rows if isinstance(one, str)]
    assert faults == [(3, "not UTF-8 text"), (5, "not CSV"), (7, "not UTF-8 text")]


def test_a_first_line_that_is_cut_off_costs_no_other() -> None:
    """Unlike the first line of JSON that goes over several."""
    content = b'{"prompt": "a\n{"prompt": "b"}\n{"prompt": "c"}\n'
    rows = list(RowFile(io.BytesIO(content), "rows.jsonl"))
    assert isinstance(rows[0][1], InvalidRequest)
    assert rows[1:] == [(2, {"prompt": "b"}), (3, {"prompt": "c"})]


def write(path: Path) -> None:
    messages = pa.list_(
        pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])
    )
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}], "temperature": None, "level": i}
        for i in range(1000)
    ]
    schema = pa.schema(
        [("messages", messages), ("temperature", pa.float64()), ("level", pa.int64())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)


def test_parquet_nulls_are_fields_that_are_not_given(tmp_path: Path) -> None:
    write(tmp_path / "rows.PARQUET")
    with (tmp_path / "rows.PARQUET").open("rb") as file:
        rows = RowFile(file, file.name)
        assert rows.unit == "row"
        for _ in range(2):  # as `submit` reads it
            found = list(rows)
            assert len(found) == 1000
            assert found[1] == (2, {"messages": [{"role": "user", "content": "1"}], "level": 1})


def test_what_is_no_parquet_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("prompt\n")
    with (tmp_path / "rows.parquet").open("rb") as file, pytest.raises(InvalidRequest):
        list(RowFile(file, file.name))


def endless(line: bytes) -> Any:
    """A file that never ends: reading all of it would never return."""

    class Endless(io.RawIOBase):
        def readable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def seek(self, offset: int, whence: int = 0) -> int:
            return 0

        def tell(self) -> int:
            return 0

        def readinto(self, buffer: Any) -> int:
            filled = (line * (len(buffer) // len(line) + 1))[: len(buffer) // len(line) * len(line)]
            buffer[: len(filled)] = filled
            return len(filled)

    return io.BufferedReader(Endless())


@pytest.mark.parametrize(
    ("name", "line"), [("rows.jsonl", b'{"prompt": "a"}\n'), ("rows.csv", b"prompt\n")]
)
def test_rows_are_read_as_a_stream(name: str, line: bytes) -> None:
    assert len(list(islice(RowFile(endless(line), name), 1000))) == 1000


def test_the_header_of_csv_counts_as_no_row(tmp_path: Path) -> None:
    for name, content, rows in (
        ("a.csv", b"prompt\na\nb\n", 2),
        ("a.tsv", b"prompt\na\nb", 2),
        ("a.csv", b"", 0),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "b"}\n', 2),
    ):
        assert RowFile(io.BytesIO(content), name).content()[1] == rows


def test_a_pipe_is_read_twice(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    os.close(writing)
    with open(reading, "rb") as file, RowFile(file, "-") as rows:
        assert list(rows) == list(rows)
        assert len(list(rows)) == 2
