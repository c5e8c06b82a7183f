"""`chatjobs report`: the file that it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND, Run
from tests.cli.test_json import documented
from tests.jobs.report.runs import large_run


def test_a_page_is_written_and_replaced(run: Run, finished_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    words = ("report", "r1", "-o", str(file), "--results", str(finished_run))
    done = run(*words)
    assert (done.exit_code, done.stdout) == (0, ""), done.output
    assert done.stderr.startswith(f"{file}: 1 run, 3 rows, ")
    first = file.read_text("utf-8")
    assert "<title>r1 · chatjobs report</title>" in first
    assert "too slow" in first
    again = run(*words, "r1", "--json")
    (found,) = [json.loads(line) for line in again.stdout.splitlines()]
    assert set(found) == documented("report")
    assert (found["runs"], found["rows"], found["file"]) == (["r1"], 3, str(file))
    assert found["bytes"] == file.stat().st_size
    assert sorted(one.name for one in tmp_path.iterdir()) == ["page.html", "r1"]


def test_what_can_not_be_written_is_refused(run: Run, finished_run: Path, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b\n")
    for output, sentence in (
        (table, "rows.csv exists and is no report of chatjobs: choose another file"),
        (tmp_path, "it is no regular file"),
        (tmp_path / "none" / "page.html", "there is no folder"),
    ):
        done = run("report", "r1", "-o", str(output), "--results", str(finished_run))
        assert done.exit_code == 2
        assert sentence in done.stderr
    assert table.read_text() == "a,b\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "Missing argument 'RUN...'"),
        (("none",), "no run 'none'"),
        (("r1", "--by", "topic"), "no column 'topic'"),
        (tuple(f"r{number}" for number in range(9)), "at most 8 runs"),
        (("r1", "--price-per-hour", "-1"), "'-1' is not a price"),
        (("r1", "--price-per-hour", "nan"), "'nan' is not a price"),
    ],
)
def test_a_wrong_call_is_refused(
    run: Run, finished_run: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    file = tmp_path / "page.html"
    done = run("report", *words, "-o", str(file), "--results", str(finished_run))
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not file.exists()


def test_a_missing_package_is_named_with_the_extra(
    run: Run, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    done = run("report", "r1", "--results", str(finished_run))
    assert done.exit_code == 2
    assert "report needs the package vl_convert: pip install" in done.stderr


def test_memory_that_is_too_small_for_the_charts_is_one_sentence(tmp_path: Path) -> None:
    large_run(tmp_path, "r1")
    file = tmp_path / "page.html"
    words = ("report", "r1", "-o", str(file), "--results", str(tmp_path))
    limited = ["sh", "-c", 'ulimit -v 4000000; exec "$@"', "sh", str(COMMAND), *words]
    before = {one.name for one in tmp_path.iterdir()}
    done = subprocess.run(limited, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: the charts can't be drawn: their process ended by SIG")
    assert "ulimit -v unlimited" in line
    assert {one.name for one in tmp_path.iterdir()} == before
    assert subprocess.run([COMMAND, *words]).returncode == 0
    page = file.read_text()
    assert page.count("<svg ") == 8
    assert subprocess.run(limited, capture_output=True).returncode == 3
    assert file.read_text() == page
