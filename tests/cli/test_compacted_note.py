"""A note of `results compact` that can't be used: one sentence in each command that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.compact import compact
from jobs.results.files import table_of, write_part
from jobs.runs.written_rows import WrittenRows
from tests.cli.conftest import Run
from tests.cli.test_run_json import damage
from tests.jobs.report.runs import scored
from tests.jobs.scores.runs import answers, make_run

DAMAGES = {
    "{": "is not JSON",
    '{"a": "\udcff"}': "is not JSON",  # the byte 255
    "[]": "is an array, not an object",
    '{"new.parquet": 1}': "new.parquet in",
    '{"new.parquet": ["a", {}]}': "is an object, not a string",
    "folder": "is no regular file",
    "loop": "can't be read (",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two files that `compact` has replaced by one, and another run."""
    root = tmp_path / "results"
    for name in ("r1", "r2"):
        make_run(root, answers(("x", "x"), ("o", "x")), name)
        scored(root, name, "exact", [1, 0])
    row = {**Results(root).table("r1").to_pylist()[0], "row_index": 2, "job_id": "r1-2"}
    write_part(root / "r1/_tmp/b", root / "r1/samples/part-b.parquet", table_of([row]))
    assert compact(Results(root), "r1") == 2
    return root


@pytest.mark.parametrize(
    "words",
    [
        ("score", "r1", "--metric", "exact"),
        ("score", "r1"),
        ("diff", "r2", "r1"),
        ("report", "r1", "r2"),
        ("results",),
        ("results", "r1"),
        ("results", "r1", "--json"),
        ("results", "r1", "--format", "jsonl", "-o", "answers.jsonl"),
        ("results", "query", "select count(*) from samples", "r1"),
        ("results", "compact", "r1"),
        ("results", "rm", "r1", "--yes"),
    ],
    ids=" ".join,
)
def test_a_damaged_one_is_one_sentence(
    run: Run, folder: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("CHATJOBS_REDIS_URL", redis_url)
    for content, fact in DAMAGES.items():
        damage(folder / "r1/_compacted.json", content)
        done = run(*words, "--results", str(folder))
        assert done.exit_code == 2, (content[:80], done.output)
        line = done.stderr.splitlines()[-1]
        assert "error" in line and str(folder / "r1/_compacted.json") in line
        assert fact in line and "restore it, or remove it" in line
    assert not any(Path(name).exists() for name in ("report.html", "answers.jsonl"))


def test_a_run_that_goes_on_says_it_too(folder: Path) -> None:
    damage(folder / "r1/_compacted.json", "{")
    with pytest.raises(InvalidRequest, match=r"_compacted\.json is not JSON"):
        WrittenRows(Results(folder), "r1", 1).refresh()


def test_without_it_the_rows_are_those_of_the_files_that_are_there(folder: Path) -> None:
    note = folder / "r1/_compacted.json"
    note.write_text("null")
    with pytest.raises(InvalidRequest, match="is null, not an object"):
        Results(folder).table("r1")
    note.unlink()
    assert Results(folder).table("r1").num_rows == 3
