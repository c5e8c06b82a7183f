"""One ordered file of a run: JSONL, CSV, Parquet."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.export.cells import cell, csv_text, defused
from jobs.results.export.ordered import COMMON_COLUMNS, ordered_tables
from jobs.results.export.write import export_columns, write_export
from jobs.results.files import write_part
from jobs.results.schema import SCHEMA
from tests.jobs.scores.runs import make_run


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Forty samples of ten rows, in two files and no order."""
    rows: list[dict[str, Any]] = [
        {"row_index": row, "repeat_index": repeat, "choice_index": choice, "text": f"t{row}"}
        for row in (7, 2, 9, 0, 4, 1, 8, 3, 6, 5)
        for repeat in (1, 0)
        for choice in (1, 0)
    ]
    rows[0] |= {
        "messages": [{"role": "user", "content": 'hü\n"q"'}],
        "token_logprobs": [-0.5, float("-inf")],
    }
    found = make_run(tmp_path, rows[:21])
    table = make_run(tmp_path / "other", rows[21:]).table("r1")
    write_part(tmp_path / "r1/_tmp/b", tmp_path / "r1/samples/part-b.parquet", table)
    return found


def keys(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["row_index"], row["repeat_index"], row["choice_index"]) for row in rows]


ORDER = [(row, repeat, choice) for row in range(10) for repeat in (0, 1) for choice in (0, 1)]


def test_rows_come_in_order_with_those_of_a_row_together(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.results.export.ordered.CHUNK_ROWS", 3)
    found = ordered_tables(results, "r1", export_columns(every=True))
    tables = [table.to_pylist() for table in found]
    assert [len(one) for one in tables] == [12, 12, 12, 4]
    assert keys([row for one in tables for row in one]) == ORDER
    assert list(ordered_tables(make_run(results.root, [], "empty"), "empty", ["text"])) == []


def test_jsonl_has_the_common_columns_or_all(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (written,) = write_export(results, "r1", "jsonl", path)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert written == (path, 40)
    assert keys(rows) == ORDER
    assert tuple(rows[0]) == COMMON_COLUMNS
    assert rows[31]["messages"][0]["content"] == 'hü\n"q"'
    write_export(results, "r1", "jsonl", path, every=True)
    text = path.read_text(encoding="utf-8")
    assert "Infinity" not in text  # which is no JSON
    row = json.loads(text.splitlines()[31])
    assert tuple(row)[: len(COMMON_COLUMNS)] == COMMON_COLUMNS
    assert {*row} == {*SCHEMA.names}
    assert row["token_logprobs"] == [-0.5, None]


def test_csv_is_read_back(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_export(results, "r1", "csv", path)
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    assert tuple(rows[0]) == COMMON_COLUMNS
    assert json.loads(rows[31]["messages"])[0]["content"] == 'hü\n"q"'
    assert (rows[0]["text"], rows[0]["target"]) == ("t0", "")


def test_parquet_keeps_the_types(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write_export(results, "r1", "parquet", path, every=True)
    table = pq.read_table(path)
    assert keys(table.to_pylist()) == ORDER
    assert table.schema.field("messages").type == SCHEMA.field("messages").type
    assert {*table.column_names} == {*SCHEMA.names}
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize(
    "text",
    ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\rx", "\nx", " =1+1", "\uff1d1", "-cmd|'x'!A1"],
)
def test_cells_that_a_spreadsheet_would_execute_are_defused(text: str) -> None:
    assert defused(text) == f"'{text}"
    lines = io.StringIO(csv_text([[text]]), newline="")
    assert next(csv.reader(lines)) == [f"'{text}"]


@pytest.mark.parametrize("text", ["-5", "+1.5e-3", "-.5", "a=b", "2-1", "", " x", "'=1", "(-1)"])
def test_numbers_and_other_texts_stay(text: str) -> None:
    assert defused(text) == text


def test_values_that_are_no_text_are_no_formulas() -> None:
    assert cell(-0.5) == -0.5
    assert cell(None) is None
    assert cell(True) == "true"
    assert cell(["=1"]) == '["=1"]'


def test_a_path_that_can_not_be_written_is_refused(results: Results, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no regular file"):
        write_export(results, "r1", "csv", tmp_path)
    with pytest.raises(InvalidRequest, match="there is no folder"):
        write_export(results, "r1", "csv", tmp_path / "no/out.csv")


def test_a_write_that_fails_leaves_the_file_before(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("out.csv", "out.parquet"):
        (tmp_path / name).write_text("before")
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "disk full")))
            with pytest.raises(OSError):
                write_export(results, "r1", "csv" if "csv" in name else "parquet", tmp_path / name)
        assert (tmp_path / name).read_text() == "before"
    assert [one.name for one in tmp_path.iterdir() if ".part" in one.name] == []
