"""`chatjobs results query`: SQL over a run, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from jobs.cli.options import RESERVED_RUNS
from jobs.cli.results import results
from tests.cli.conftest import Run, Show, Spawn
from tests.jobs.scores.runs import make_run
from tests.waiting import PATIENCE


def test_rows_and_scores_are_tables(run: Run, finished_run: Path) -> None:
    results = ("--results", str(finished_run))
    run("score", "r1", "-m", "json", *results)
    done = run(
        "results", "query", "select status, count(*) as n from samples group by 1 order by 1",
        "r1", "--json", *results,
    )  # fmt: skip
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"status": "error", "n": 1},
        {"status": "ok", "n": 2},
    ]
    joined = (
        "select s.text, c.value from samples s join scores c using (row_index, repeat_index, "
        "choice_index) where c.status = 'ok' order by row_index"
    )
    table = run("results", "query", joined, "r1", *results)
    assert [line.split() for line in table.stdout.splitlines()] == [
        ["text", "value"],
        ["ho", "0.0"],
        ["ho", "0.0"],
    ]
    moment = run("results", "query", "select max(finished_at) as t from samples", "r1", *results)
    assert "1970-01-01" in moment.stdout  # times need no package for time zones


@pytest.mark.parametrize(
    "sql",
    [
        "select * from '{folder}/r1/samples/part-a.parquet'",
        "select * from read_text('/etc/passwd')",
        "select * from sniff_csv('/etc/passwd')",
        "copy samples to '{folder}/copy.csv'",
        "attach '{folder}/x.db'",
        "set enable_external_access = true",
        "select * from store",
        "select * from sys",
        "install httpfs",
        "selec 1",
        "select * from nothing",
        "select error('no')",
        "create table x (a int)",
        "select 1; drop view samples",
        "",
    ],
)
def test_what_is_no_query_of_the_run_is_refused(run: Run, finished_run: Path, sql: str) -> None:
    before = sorted(finished_run.rglob("*"))
    done = run(
        "results", "query", sql.format(folder=finished_run), "r1", "--results", str(finished_run)
    )
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: the query ")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(finished_run.rglob("*")) == before


def test_the_run_before_the_query_is_named(run: Run, finished_run: Path) -> None:
    done = run("results", "query", "r1", "select 1", "--results", str(finished_run))
    assert done.exit_code == 2
    assert 'the query comes before the run: chatjobs results query "select …" r1' in done.stderr


def test_objects_are_json_in_a_table(run: Run, finished_run: Path) -> None:
    sql = "select {'a': null, 'b': ['x', null], 'c': '2026-01-02'::date} as s"
    done = run("results", "query", sql, "r1", "--results", str(finished_run))
    assert done.stdout.splitlines()[1] == '{"b": ["x", null], "c": "2026-01-02"}'


def test_values_of_every_type_are_printed(run: Run, finished_run: Path) -> None:
    sql = (
        "select 1.50::decimal(9, 2) as d, 'nan'::double as n, '2026-01-02'::date as day, "
        "interval 1 hour as i, [1, 2] as l, {'a': null} as s, uuid() is not null as b, "
        "2::hugeint as h"
    )
    done = run("results", "query", sql, "r1", "--json", "--results", str(finished_run))
    assert json.loads(done.stdout) == {
        "d": 1.5,
        "n": None,
        "day": "2026-01-02",
        "i": [0, 0, 3_600_000_000_000],
        "l": [1, 2],
        "s": {"a": None},
        "b": True,
        "h": 2,
    }
    assert run("results", "query", sql, "r1", "--results", str(finished_run)).exit_code == 0


def test_a_process_writes_rows_to_stdout_and_nothing_to_stderr(
    spawn: Spawn, finished_run: Path
) -> None:
    words = ("select count(*) from samples", "r1", "--json", "--results", str(finished_run))
    done = spawn("results", "query", *words)
    out, err = done.communicate(timeout=PATIENCE)
    assert (json.loads(out), err, done.returncode) == ({"count_star()": 3}, "", 0)


def test_a_missing_package_is_named_with_the_extra(
    run: Run, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    done = run("results", "query", "select 1", "r1", "--results", str(finished_run))
    assert done.exit_code == 2
    assert "results query needs the package duckdb: pip install" in done.stderr


def test_a_new_run_is_not_named_as_a_subcommand(run: Run) -> None:
    assert {*results.commands} == RESERVED_RUNS
    for name in RESERVED_RUNS:
        done = run("submit", "-", "--model", "m", "--run", name, input='{"prompt": "hi"}')
        assert done.exit_code == 2
        assert f"'{name}' is a subcommand of chatjobs results" in done.stderr


def test_a_run_named_as_a_subcommand_can_be_shown(run: Run, finished_run: Path) -> None:
    (finished_run / "r1").rename(finished_run / "query")
    done = run("results", "show", "query", "--results", str(finished_run))
    assert done.exit_code == 0
    assert "rows        3" in done.stdout


def test_all_columns_fit_a_terminal_and_are_whole_in_a_pipe(show: Show, tmp_path: Path) -> None:
    row = {"text": "x" * 100, "messages": [{"role": "user", "content": "word " * 40}]}
    make_run(tmp_path, [{**row, "request_hash": "f" * 64, "target": "t" * 79}])
    words = ("results", "query", "select * from samples", "r1", "--results", str(tmp_path))
    shown = show(*words, terminal=True)
    plain = re.sub(r"\x1b\[\d*m", "", shown.out)
    assert max(map(len, plain.splitlines())) <= 80
    assert "f" * 64 in shown.out and "t" * 60 in shown.out
    piped = show(*words)
    assert "x" * 100 in piped.out and "t" * 79 in piped.out
