"""Targets of a file by the keys of its rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import JobError
from jobs.data_sets.target_file import TargetFile


def read(file: Path, **names: str) -> TargetFile:
    return TargetFile(file, {column: field for field, column in names.items()})


def test_rows_are_found_by_their_custom_id_before_their_row_index(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("row_index,custom_id,target\n7,a,5\n8,b,\n")
    with read(file) as targets:
        assert targets.of({"row_index": 0, "custom_id": "a"}) == "5"
        assert targets.of({"row_index": 0, "custom_id": "b"}) is None  # it has none
        with pytest.raises(KeyError):
            targets.of({"row_index": 7, "custom_id": "c"})


def test_the_rows_of_an_export_without_custom_ids_are_found_by_their_row_index(
    tmp_path: Path,
) -> None:
    for name, text in (
        ("t.csv", "custom_id,row_index,right\n,0,x\n,10,y\n"),
        (
            "t.jsonl",
            '{"custom_id": null, "row_index": 0, "right": "x"}\n{"row_index": 10.0, "right": "y"}',
        ),
    ):
        (tmp_path / name).write_text(text)
        with read(tmp_path / name, target="right") as targets:
            assert [targets.of({"row_index": n, "custom_id": None}) for n in (0, 10)] == ["x", "y"]


def test_typed_columns_have_the_text_that_a_data_set_gives_them(tmp_path: Path) -> None:
    columns = {"id": [11, 12], "answer": [5.0, 2.5], "row_index": [1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    with read(tmp_path / "t.parquet", custom_id="id", target="answer") as targets:
        found = [targets.of({"row_index": 0, "custom_id": one}) for one in ("11", "12")]
    assert found == ["5", "2.5"]


def test_the_digest_is_that_of_the_targets_by_their_keys(tmp_path: Path) -> None:
    texts = {
        "a.csv": "row_index,target\n0,x\n1,y\n",
        "b.jsonl": '{"target": "x", "row_index": 0, "more": 1}\n{"target": "y", "row_index": 1}\n',
        "c.csv": "row_index,target\n0,x\n1,z\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    first, same, other = (read(tmp_path / name).digest for name in texts)
    assert first == same != other


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("t.csv", "row_index,answer\n0,x\n", "no row has a target"),
        ("t.csv", "row_index,answer\n0,x\n", "its columns are row_index, answer"),
        ("t.csv", "id,target\n0,x\n", "line 2 has no row_index: a row needs the custom_id or"),
        ("t.csv", "row_index,target\n0,x\n,y\n", "line 3 has no row_index"),
        ("t.csv", "custom_id,target\na,x\n,y\n", "line 3 has no custom_id"),
        ("t.csv", "row_index,target\n0,x\n1,y\n0,x\n", "line 4: a row before it has row_index '0'"),
        ("t.csv", "row_index,target\n-1,x\n", "row_index: '-1' is no integer from 0"),
        (
            "t.jsonl",
            '{"row_index": 0, "target": ["x"]}\n',
            "target: expected text or a number, got a",
        ),
        ("t.jsonl", '{"row_index": 0\n', "line 1: not JSON"),
        ("t.csv", "row_index,target\n", "no row has a target"),
    ],
)
def test_a_file_that_names_no_target_for_a_row_is_refused(
    tmp_path: Path, name: str, text: str, sentence: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(JobError) as raised:
        read(file)
    assert raised.value.message.startswith(f"{file}: ")
    assert sentence in raised.value.message
