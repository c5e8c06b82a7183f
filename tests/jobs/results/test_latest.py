"""Reading a run in which a key has several rows: the newest attempt counts."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs import Results
from jobs.operations import rows_of
from jobs.results.files import table_of, write_part
from tests.worker.site import ROOT


def row(index: int, attempt: int, text: str, *, second: int = 0, **more: Any) -> dict[str, Any]:
    entry: Any = {"job_id": f"job-{index}", "run": "r", "row_index": index, "attempt": attempt}
    (found,) = rows_of(entry)
    moment = datetime(2026, 1, 1, second=second, tzinfo=UTC)
    return {**found, "text": text, "finished_at": moment, **more}


def write(folder: Path, *parts: list[dict[str, Any]]) -> Results:
    for number, rows in enumerate(parts):
        name = f"part-{number}.parquet"
        write_part(folder / "r/_tmp" / name, folder / "r/samples" / name, table_of(rows))
    return Results(folder)


def texts(results: Results) -> list[str]:
    table = results.table("r", ["row_index", "choice_index", "text"])
    return table.sort_by([("row_index", "ascending"), ("choice_index", "ascending")])[
        "text"
    ].to_pylist()


PARTS = {
    "a later attempt": (
        [row(0, 1, "old"), row(1, 1, "one")],
        [row(0, 2, "new"), row(2, 1, "two")],
    ),
    "an attempt that Redis forgot": (
        [row(0, 1, "new", second=9)],
        [row(0, 1, "old", second=3), row(1, 1, "one"), row(2, 1, "two")],
    ),
    "fewer choices": (
        [row(0, 1, "old"), row(0, 1, "old", choice_index=1), row(1, 1, "one")],
        [row(0, 2, "new"), row(2, 1, "two")],
    ),
    "a repeat of the row": (
        [row(0, 1, "old", repeat_index=1), row(1, 1, "one")],
        [row(0, 2, "new", repeat_index=1), row(2, 1, "two")],
    ),
    "a job that never ran": (
        [row(0, 0, "old", finished_at=None), row(1, 0, "one", finished_at=None)],
        [row(0, 1, "new"), row(2, 1, "two")],
    ),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=list(PARTS))
def test_the_newest_attempt_counts(tmp_path: Path, parts: Any) -> None:
    results = write(tmp_path, *parts)
    assert texts(results) == ["new", "one", "two"]
    assert results.dataset("r").count_rows() == 3
    assert results.dataset("r").to_table().num_rows == 3


def test_all_choices_of_the_newest_attempt_are_read(tmp_path: Path) -> None:
    choices = [row(0, 2, text, choice_index=number) for number, text in enumerate("abc")]
    assert texts(write(tmp_path, [row(0, 1, "old")], choices)) == ["a", "b", "c"]


def test_rows_of_different_jobs_are_never_dropped(tmp_path: Path) -> None:
    other = row(0, 1, "b", job_id="other")
    assert texts(write(tmp_path, [row(0, 2, "a"), row(0, 1, "old")], [other])) == ["a", "b"]


def test_repeats_of_a_row_are_rows_of_their_own(tmp_path: Path) -> None:
    repeats = [row(0, 2, text, repeat_index=n, job_id=text) for n, text in enumerate("ab")]
    assert sorted(texts(write(tmp_path, repeats, [row(0, 1, "old", job_id="a")]))) == ["a", "b"]


def test_many_keys_with_two_rows(tmp_path: Path) -> None:
    old = [row(number, 1, "old") for number in range(2000)]
    new = [row(number, 2, "new") for number in range(2000)]
    assert set(texts(write(tmp_path, old + new))) == {"new"}


def test_the_query_for_other_readers_is_right(tmp_path: Path) -> None:
    """The query in docs/operations.md, in DuckDB."""
    import duckdb

    page = (ROOT / "docs/operations.md").read_text()
    query = page.partition("    select *\n")[2].partition("\n\n")[0]
    for number, parts in enumerate(PARTS.values()):
        folder = tmp_path / str(number)
        results = write(folder, *parts)
        files = f"{folder}/r/samples/*.parquet"
        table = duckdb.sql(f"select * {query}".replace("<run>/samples/*.parquet", files)).arrow()
        assert sorted(table.read_all()["text"].to_pylist()) == sorted(texts(results))
