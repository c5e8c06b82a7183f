"""A run.json that can't be used: one sentence in commands that read it, no fault in others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from jobs.scores.judge import Judge
from tests.cli.conftest import Run
from tests.jobs.report.runs import scored
from tests.jobs.scores.runs import answers, make_run

DAMAGES = {
    "{": "is not JSON",
    "[" * 100_000: "is not JSON",
    '{"run_id": "\udcff"}': "is not JSON",  # the byte 255
    f'{{"state": {"1" * 5000}}}': "is not JSON",
    "[]": "is an array, not an object",
    "null": "is null, not an object",
    '{"state": 1}': "is an integer, not a string",
    '{"audit": [1]}': "is an array, not an object",
    '{"audit": {"rows_in": 1.5, "samples": 1}}': "is a number, not an integer",
    '{"configuration": "c"}': "is a string, not an object",
    '{"configuration": {"data set": true}}': "is a boolean, not an object",
    '{"configuration": {"data set": {"content": {}}}}': "is an object, not a string",
    '{"configuration": {"limit": "9"}}': "is a string, not an integer",
    "folder": "is no regular file",
    "pipe": "is no regular file",
    "loop": "can't be read (",
}
JUDGE = Judge.of("demo", {}).run_of("r1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two runs of a data set, scored by exact."""
    for name in ("r1", "r2"):
        make_run(tmp_path / "results", answers(("x", "x"), ("o", "x")), name)
        scored(tmp_path / "results", name, "exact", [1, 0])
    return tmp_path / "results"


def damage(file: Path, content: str) -> None:
    file.parent.mkdir(exist_ok=True)
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    match content:
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "loop":
            file.symlink_to(file)
        case _:
            file.write_text(content, "utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("run", "data.jsonl", "-m", "demo", "--run", "r1"), "r1"),
        (("run", "data.jsonl", "-m", "demo", "--run", "r1", "--dry-run"), "r1"),
        (("score", "r1", "--metric", "judge:demo"), JUDGE),
        (("diff", "r1", "r2"), "r2"),
        (("report", "r1", "r2"), "r2"),
    ],
    ids=["run", "dry-run", "judge", "diff", "report"],
)
def test_a_damaged_one_is_one_sentence_in_each_command_that_reads_it(
    run: Run,
    folder: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("data.jsonl").write_text('{"prompt": "p"}\n')
    monkeypatch.setenv("CHATJOBS_REDIS_URL", redis_url)
    for content, fact in DAMAGES.items():
        damage(folder / name / "run.json", content)
        done = run(*words, "--results", str(folder))
        assert done.exit_code == 2, (content[:80], done.output)
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: ") and str(folder / name / "run.json") in line
        assert fact in line and "restore it, or remove it" in line
    assert not Path("report.html").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("results",),
        ("results", "r1"),
        ("results", "r1", "--format", "jsonl", "-o", "-"),
        ("results", "query", "select count(*) from samples", "r1"),
        ("score", "r1"),
    ],
    ids=["list", "summary", "export", "query", "score"],
)
def test_commands_that_need_the_rows_alone_work_without_it(
    run: Run, folder: Path, words: tuple[str, ...]
) -> None:
    for content in ("{", '{"configuration": 1}', "folder"):
        damage(folder / "r1/run.json", content)
        done = run(*words, "--results", str(folder))
        assert done.exit_code == 0, done.output


def test_with_json_the_error_is_an_object(run: Run, folder: Path) -> None:
    damage(folder / "r1/run.json", "{")
    done = run("diff", "r1", "r2", "--json", "--results", str(folder))
    assert done.exit_code == 2
    assert json.loads(done.stderr)["error"]["code"] == "invalid_request"
