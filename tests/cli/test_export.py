"""`chatjobs results RUN --format …`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Run
from tests.disks import Disk
from tests.jobs.scores.runs import make_run


def test_each_format_is_written_to_a_file(run: Run, finished_run: Path, tmp_path: Path) -> None:
    results = ("--results", str(finished_run))
    for name in ("jsonl", "csv", "parquet", "openai-batch"):
        done = run("results", "r1", "--format", name, "-o", str(tmp_path / f"x.{name}"), *results)
        assert done.exit_code == 0, done.output
        assert done.stdout == ""
        assert f"x.{name}: {2 if 'batch' in name else 3} rows" in done.stderr
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    assert [json.loads(line)["row_index"] for line in lines] == [0, 1, 2]
    with (tmp_path / "x.csv").open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == ["ho", "ho", ""]
    assert pq.read_table(tmp_path / "x.parquet")["text"].to_pylist() == ["ho", "ho", None]
    (error,) = (tmp_path / "x.errors.openai-batch").read_text().splitlines()
    assert json.loads(error)["error"]["code"] == "batch_expired"


def test_text_formats_go_to_stdout_without_a_file(run: Run, finished_run: Path) -> None:
    done = run("results", "r1", "--format", "csv", "--results", str(finished_run))
    header, *rows = done.stdout.splitlines()
    assert header.startswith("row_index,repeat_index,choice_index,custom_id,status")
    assert len(rows) == 3
    every = run(
        "results", "r1", "--format", "jsonl", "--all-columns", "--results", str(finished_run)
    )
    assert {"job_id", "worker_id"} < {*json.loads(every.stdout.splitlines()[0])}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--format", "csv"), "--format needs a RUN"),
        (("r1", "--format", "csv", "--json"), "excludes --json"),
        (("r1", "-o", "x"), "need --format"),
        (("r1", "--format", "parquet"), "--format parquet needs a file: add -o FILE"),
        (("r1", "--format", "csv", "-o", "/no/such/x"), "there is no folder /no/such"),
        (("r2", "--format", "csv"), "no run 'r2'"),
        (("r1", "--format", "xml"), "is not one of"),
    ],
)
def test_wrong_usage_is_refused(
    run: Run, finished_run: Path, words: tuple[str, ...], sentence: str
) -> None:
    done = run("results", *words, "--results", str(finished_run))
    assert done.exit_code == 2
    assert sentence in done.stderr


@pytest.mark.parametrize("form", ["jsonl", "openai-batch", "parquet"])
def test_a_full_disk_is_named_with_the_file_and_what_to_do(
    run: Run, tmp_path: Path, form: str
) -> None:
    results = make_run(tmp_path / "results", [{"custom_id": "a", "text": "x" * 10_000}])
    disk = Disk(tmp_path / "mount", tmp_path / "disk", "100k")
    try:
        disk.fill()
        file = disk.mount / "out"
        found = run(
            "results", "r1", "--format", form, "-o", str(file), "--results", str(results.root)
        )
        assert found.exit_code == 3
        assert f"{file}: No space left on device: free space there" in found.stderr
        assert [one.name for one in disk.mount.iterdir()] == ["filler"]
    finally:
        disk.close()
