"""`chatjobs results` lists runs, summarises one and prints its rows."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq

from jobs import Client, RequestFields, Results, keys
from tests.cli.conftest import Run


def test_runs_are_listed_with_their_row_counts(run: Run, finished_run: Path) -> None:
    result = run("results", "--results", str(finished_run))
    assert result.stdout.split() == ["r1", "3", "rows"]
    result = run("results", "--json", "--results", str(finished_run))
    assert json.loads(result.stdout) == {"run": "r1", "rows": 3, "unwritten": None}


def test_the_run_that_was_written_last_is_listed_first(run: Run, finished_run: Path) -> None:
    for moment, name in ((3, "r1"), (9, "a"), (1, "z"), (5, "m")):
        if name != "r1":
            shutil.copytree(finished_run / "r1", finished_run / name)
        os.utime(finished_run / name / "samples", (moment, moment))
    for words in ((), ("--json",)):
        lines = run("results", *words, "--results", str(finished_run)).stdout.splitlines()
        names = [json.loads(line)["run"] if words else line.split()[0] for line in lines]
        assert names == ["a", "m", "r1", "z"]


def test_a_run_is_summarised(run: Run, finished_run: Path) -> None:
    result = run("results", "r1", "--results", str(finished_run))
    facts = dict(
        line.split(maxsplit=1) for line in result.stdout.splitlines() if "tokens" not in line
    )
    assert (facts["rows"], facts["ok"], facts["error"], facts["cancelled"]) == ("3", "2", "1", "0")
    assert facts["errors"] == "timeout 1"
    assert facts["folder"] == str(finished_run / "r1")
    assert "tokens out  4" in result.stdout


def test_rows_are_printed_as_json_lines(run: Run, finished_run: Path) -> None:
    result = run("results", "r1", "--json", "--results", str(finished_run))
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["row_index"], row["status"], row["text"]) for row in rows] == [
        (0, "ok", "ho"),
        (1, "ok", "ho"),
        (2, "error", None),
    ]
    assert rows[0]["finished_at"] == "1970-01-01T00:00:01+00:00"


def test_an_unknown_run_is_an_error_that_lists_the_runs(run: Run, finished_run: Path) -> None:
    result = run("results", "r2", "--results", str(finished_run))
    assert result.exit_code == 2
    assert "r1" in result.stderr


def test_an_empty_folder_has_no_runs(run: Run, tmp_path: Path) -> None:
    result = run("results", "--results", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"no runs in {tmp_path}\n"


def test_a_folder_of_another_program_is_no_run(run: Run, finished_run: Path) -> None:
    (finished_run / "my notes/samples").mkdir(parents=True)
    result = run("results", "--results", str(finished_run))
    assert (result.exit_code, result.stdout.split()) == (0, ["r1", "3", "rows"]), result.stderr


def test_one_row_is_not_called_rows(run: Run, finished_run: Path) -> None:
    (part,) = (finished_run / "r1/samples").iterdir()
    pq.write_table(pq.read_table(part).slice(0, 1), part)
    assert run("results", "--results", str(finished_run)).stdout.split() == ["r1", "1", "row"]


def test_a_broken_file_is_named_and_the_others_are_read(run: Run, finished_run: Path) -> None:
    broken = finished_run / "r1/samples/part-b.parquet"
    broken.write_bytes((finished_run / "r1/samples/part-a.parquet").read_bytes()[:-100])
    words = ("--results", str(finished_run))
    listed, summary, rows = (
        run("results", *words),
        run("results", "r1", *words),
        run("results", "r1", "--json", *words),
    )
    assert listed.stdout.split() == ["r1", "3", "rows"]
    assert "rows        3" in summary.stdout
    assert len(rows.stdout.splitlines()) == 3
    for result in (listed, summary, rows):
        assert result.exit_code == 1
        warning, error = result.stderr.splitlines()
        assert str(broken) in warning
        assert "1 file can't be read" in error


def test_a_run_is_deleted_unless_something_of_it_is_on_its_way(
    run: Run, finished_run: Path, redis_url: str
) -> None:
    words = ("results", "rm", "r1", "--results", str(finished_run), "--redis", redis_url)
    asked = run(*words)
    assert asked.exit_code == 2 and "--yes is needed" in asked.stderr
    with Client(redis_url) as client:
        client.serving = None

        def submit(row: int) -> str:
            request: RequestFields = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            return client.submit({**request, "job": {"run": "r1", "row": row}}).id

        first = submit(0)
        waits = run(*words, "--yes")
        assert waits.exit_code == 1
        assert "1 job of run r1 has not ended" in waits.stderr
        client.job(first).cancel()
        written = run(*words, "--yes")
        assert written.exit_code == 1 and "run r1 is being written: 1 row is" in written.stderr
        client.redis.delete(keys.outbox("r1"))
        client.redis.set(keys.producer("r1"), '{"pid": 1, "host": "elsewhere"}')
        held = run(*words, "--yes")
        assert held.exit_code == 1
        assert "process 1 on elsewhere runs r1 (chatjobs run): end it first" in held.stderr
        client.redis.delete(keys.producer("r1"))
        client.redis.set(keys.RESULTS, '{"id": "x", "host": "h", "path": "/other"}')
        (finished_run / ".chatjobs-id").write_text("y" * 32)
        other = run(*words, "--yes")
        client.redis.delete(keys.RESULTS)
        assert Results(finished_run).runs() == ["r1"]

        removed = run(*words, "--yes", "--json")
        assert (removed.exit_code, json.loads(removed.stdout)) == (
            0,
            {"run": "r1", "rows": 3, "files": 1},
        ), removed.stderr
        assert Results(finished_run).runs() == []
        assert [one.name for one in finished_run.iterdir()] == [".chatjobs-id"]
        assert not client.redis.exists(keys.producer("r1"))
        assert client.job(first).status() == "unknown"
        assert client.job(submit(0)).status() == "queued"  # the row is free again
        assert "the workers of this Redis write to another folder, /other" in other.stderr
    assert run(*words, "--yes").exit_code == 2  # there is no such run
