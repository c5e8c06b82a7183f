"""The table of scores on disk: whole, replaced, and read by every reader."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.files import write_scores
from jobs.results.scores import SCORES_SCHEMA, score_file
from tests.jobs.scores.runs import make_run


def table(values: list[float | None], metric: str = "exact") -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "schema_version": 1,
                "run_id": "r1",
                "model": "demo",
                "row_index": row,
                "repeat_index": 0,
                "choice_index": 0,
                "metric": metric,
                "status": "error" if value is None else "ok",
                "value": value,
                "error": "why" if value is None else None,
                "statistics": [1.0, 2.0] if value else None,
                "scorer_version": "1",
                "created_at": datetime.now(UTC),
            }
            for row, value in enumerate(values)
        ],
        SCORES_SCHEMA,
    )


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return make_run(tmp_path, [{"text": "a"}, {"text": "b"}])


def test_scores_are_replaced_and_other_metrics_stay(results: Results) -> None:
    assert len(results.scores("r1")) == 0
    write_scores(results, "r1", "exact", [table([1.0, 0.0])])
    write_scores(results, "r1", "edit", [table([0.5, 0.5], "edit")])
    write_scores(results, "r1", "exact", [table([0.0, 0.0])])
    assert results.scores("r1", ["exact"])["value"].to_pylist() == [0.0, 0.0]
    assert len(results.scores("r1")) == 4
    assert results.scores("r1", columns=["metric"]).column_names == ["metric"]


def test_a_metric_or_column_that_is_not_there_is_named(results: Results) -> None:
    write_scores(results, "r1", "exact", [table([1.0])])
    with pytest.raises(InvalidRequest, match="run r1 has no scores by number: chatjobs score r1"):
        results.scores("r1", ["exact", "number"])
    with pytest.raises(InvalidRequest, match="no column 'score' in scores; columns are: schema_v"):
        results.scores("r1", columns=["score"])


def test_a_write_that_fails_changes_nothing(results: Results) -> None:
    write_scores(results, "r1", "exact", [table([1.0])])

    def half() -> Iterator[pa.Table]:
        yield table([0.0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_scores(results, "r1", "exact", half())
    assert results.scores("r1")["value"].to_pylist() == [1.0]
    left = [file.name for file in results.path("r1").rglob("*") if file.is_file()]
    assert sorted(left) == ["README.md", "exact.parquet", "part-a.parquet", "run.json"]


def test_columns_are_of_one_type_whether_they_have_values_or_not(results: Results) -> None:
    write_scores(results, "r1", "a", [table([1.0])])
    write_scores(results, "r1", "b", [table([None])])
    glob = str(results.path("r1") / "scores/*.parquet")
    assert duckdb.sql(f"select count(*), avg(value), max(error) from '{glob}'").fetchall() == [
        (2, 1.0, "why")
    ]
    assert pl.read_parquet(glob)["value"].to_list() == [1.0, None]
    frame = pd.read_parquet(results.path("r1") / "scores")
    assert frame["error"].tolist()[1] == "why"


def test_hugging_face_datasets_load_scores_and_samples(
    results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()
    folder, cache = str(results.path("r1")), str(tmp_path / "cache")
    assert load_dataset(folder, split="train", cache_dir=cache).num_rows == 2  # without scores
    write_scores(results, "r1", "exact", [table([1.0, None, 0.0])])
    scores = load_dataset(folder, "scores", split="train", cache_dir=cache)
    assert scores["value"][:] == [1.0, None, 0.0]
    assert load_dataset(folder, split="train", cache_dir=cache).num_rows == 2


def test_a_damaged_file_is_named(results: Results) -> None:
    file = write_scores(results, "r1", "exact", [table([1.0])])
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(InvalidRequest, match=r"exact\.parquet can't be read: remove it"):
        results.scores("r1")


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    results = make_run(tmp_path / "model=x", [{"text": "a"}])
    write_scores(results, "r1", "exact", [table([1.0])])
    assert results.scores("r1").schema.equals(SCORES_SCHEMA)


def test_each_metric_has_a_file_of_its_own() -> None:
    names = ["exact", "exact:case", "regex:a", "regex:A", "regex:.", "chrf++", "pass@5:exact"]
    files = {score_file(Path(), name).name for name in names}
    assert len(files) == len(names)
    assert {"exact.parquet", "chrf++.parquet"} < files
    assert not [file for file in files if "/" in file or file.startswith((".", "_"))]
