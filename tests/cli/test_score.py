"""`chatjobs score`: what it prints, writes and refuses."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from jobs import Results
from jobs.cli.progress import RowProgress
from jobs.report.score_tables import score_tables
from jobs.results.compact import compact
from tests.cli.conftest import Run, Show
from tests.cli.test_json import documented
from tests.jobs.scores.runs import answers, make_run


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A run of four answers, three of them right, and a failed job."""
    rows = answers(("a", "a"), ("b", "b"), ("c", "x"), ("d", "d"), (None, "e"))
    for row, task in zip(rows, ["p", "p", "q", "q", "q"], strict=True):
        row["metadata"] = json.dumps({"task": task})
    make_run(tmp_path, rows)
    return str(tmp_path)


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_it_scores_and_prints_one_object_for_each_metric_and_group(run: Run, folder: str) -> None:
    words = ("score", "r1", "--metric", "exact", "--by", "task", "--json", "--results", folder)
    done = run(*words)
    assert done.exit_code == 0, done.output
    whole, first, second = objects(done.stdout)
    assert set(whole) == documented("score")
    assert (whole["metric"], whole["by"], whole["value"]) == ("exact", {}, 0.75)
    assert [whole[name] for name in ("rows", "scored", "no_answer", "errors")] == [5, 4, 1, 0]
    assert 0 <= whole["low"] <= 0.75 <= whole["high"] <= 1
    assert (first["by"], first["value"], second["by"], second["value"]) == (
        {"task": "p"},
        1.0,
        {"task": "q"},
        0.5,
    )
    assert "1 row without an answer" in done.stderr
    again = run(*words)
    assert objects(again.stdout) == objects(done.stdout)
    assert len(Results(folder).scores("r1")) == 5  # replaced


def test_the_table_fits_80_columns(show: Show, folder: str) -> None:
    words = ("score", "r1", "-m", "exact", "-m", "number", "--by", "task", "--results", folder)
    done = show(*words, terminal=True)
    assert done.code == 1
    lines = done.out.splitlines()
    assert all(len(line) <= 88 for line in lines)  # with the codes of bold text
    assert lines[1].split() == ["exact", "all", "0.7500", *lines[1].split()[3:6], "4", "1", "0"]
    assert "number: row 0: the target 'a' holds no number" in done.err
    assert "not scored: 4 of 5 rows by number" in done.err


def test_without_a_metric_it_prints_what_is_scored(run: Run, folder: str) -> None:
    results = ("--results", folder)
    nothing = run("score", "r1", *results)
    assert nothing.exit_code == 2
    assert "has no scores: chatjobs score r1 --metric exact writes some" in nothing.stderr
    run("score", "r1", "--metric", "exact", "--metric", "json", *results)
    printed = run("score", "r1", "--json", *results)
    assert printed.exit_code == 0
    assert {one["metric"]: one["value"] for one in objects(printed.stdout)} == {
        "exact": 0.75,
        "json": 0.0,
    }


def test_scores_of_fewer_rows_are_named(run: Run, folder: str) -> None:
    assert run("score", "r1", "-m", "exact", "--results", folder).stderr.count("scored") == 1
    make_run(Path(folder), answers(*[("a", "a")] * 7))
    printed = run("score", "r1", "--results", folder)
    sentence = (
        "run r1 has other rows than when exact was scored: chatjobs score r1 --metric 'exact'"
    )
    assert sentence in printed.stderr
    compared = run("diff", "r1", "r1", "--results", folder)
    assert compared.stderr.count(sentence) == 2
    (table,) = score_tables(Results(folder), ["r1"], (), 0)
    assert table.stale == (sentence,)


def test_scores_are_of_the_rows_and_not_of_their_files(run: Run, folder: str) -> None:
    """A failed row that is run again leaves the number of rows; one file of all leaves the rows."""
    ended = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [{**row, "finished_at": ended} for row in answers(*[("a", "a")] * 4, (None, "a"))]
    results = make_run(Path(folder), rows)
    run("score", "r1", "-m", "exact", "--results", folder)
    for change in ({"status": "ok", "text": "a"}, {"finished_at": ended + timedelta(seconds=1)}):
        make_run(Path(folder), [*rows[:4], {**rows[4], **change}])
        assert "other rows than when" in run("score", "r1", "--results", folder).stderr
        run("score", "r1", "-m", "exact", "--results", folder)
    (file,) = results.files("r1")
    table = pq.read_table(file)
    pq.write_table(table.slice(3), file.with_name("part-b.parquet"))
    pq.write_table(table.slice(0, 3), file)
    assert compact(results, "r1") == 2
    assert run("score", "r1", "--results", folder).stderr == ""


def test_pass_at_k_scores_its_metric_first(run: Run, folder: str) -> None:
    done = run("score", "r1", "--metric", "pass@1:exact", "--json", "--results", folder)
    assert [(one["metric"], one["value"]) for one in objects(done.stdout)] == [
        ("exact", 0.75),
        ("pass@1:exact", 0.75),
    ]


def test_a_function_that_fails_costs_its_rows_alone(run: Run, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def score(row):\n"
        "    if row['text'] == 'b': raise RuntimeError('no b')\n"
        "    return row['target'] == row['text']\n"
    )
    done = run("score", "r1", "-m", f"{file}:score", "--json", "--results", folder)
    assert done.exit_code == 1
    (one,) = objects(done.stdout)
    assert (one["scored"], one["errors"], one["value"]) == (3, 1, pytest.approx(2 / 3))
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["lines"] == [f"{file}:score: row 1: RuntimeError: no b"]
    rows = Results(folder).scores("r1").to_pylist()
    assert {row["error"] for row in rows} == {None, "RuntimeError: no b"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("r2", "-m", "exact"), "no run 'r2'"),
        (("r1", "-m", "exakt"), "no metric 'exakt' (did you mean exact?)"),
        (("r1", "-m", "exact:x"), "unknown normalisation 'x'"),
        (("r1", "-m", "perplexity"), "has log-probabilities"),
        (("r1", "-m", "exact", "--by", "topic"), "its fields are task"),
        (("bare", "-m", "exact"), "no row of run bare has a target"),
        (("bare", "-m", "exact"), "chatjobs score --target FILE"),
        (("failed", "-m", "exact"), "no row of run failed has an answer"),
    ],
)
def test_what_can_not_be_scored_is_refused_with_a_sentence(
    run: Run, folder: str, words: tuple[str, ...], sentence: str
) -> None:
    make_run(Path(folder), answers(("a", None)), "bare")
    make_run(Path(folder), answers((None, "a")), "failed")
    done = run("score", *words, "--results", folder)
    assert done.exit_code == 2, done.output
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_targets_that_came_later_replace_those_of_the_run(
    run: Run, folder: str, tmp_path: Path
) -> None:
    file = tmp_path / "late.csv"
    file.write_text("row_index,answer\n0,a\n4,e\n3,\n2,c\n1,x\n9,of no row\n")
    words = ("score", "r1", "--target", str(file), "--map", "answer=target", "--results", folder)
    done = run(*words, "-m", "exact", "-m", "pass@1:exact", "--json")
    one, _ = objects(done.stdout)
    assert (one["value"], one["scored"], one["errors"]) == (pytest.approx(2 / 3), 3, 1)
    assert "row 3: the row has no target" in done.stderr
    make_run(Path(folder), answers(("a", None), ("b", None)), "bare")
    bare = run("score", "bare", *words[2:], "-m", "exact", "--json")
    assert (bare.exit_code, objects(bare.stdout)[0]["value"]) == (0, 0.5)


def test_targets_for_some_rows_only_are_refused(run: Run, folder: str, tmp_path: Path) -> None:
    file = tmp_path / "late.jsonl"
    file.write_text("".join(f'{{"row_index": {n}, "target": "a"}}\n' for n in (0, 1, 2)))
    words = ("score", "r1", "--target", str(file), "--results", folder)
    done = run(*words, "-m", "exact")
    assert done.exit_code == 2, done.output
    assert f"{file} has no target for 2 of 5 rows of run r1, such as row_index 3" in done.stderr
    assert not (Path(folder) / "r1/scores").exists()
    assert "--target needs a metric" in run(*words).stderr
    alone = run("score", "r1", "-m", "exact", "--map", "a=target", "--results", folder)
    assert "--map needs --target FILE" in alone.stderr
    wrong = run(*words, "-m", "exact", "--map", "a=prompt")
    assert "known are target, custom_id, row_index" in wrong.stderr


def test_other_columns_make_groups(run: Run, folder: str) -> None:
    done = run("score", "r1", "-m", "exact", "--by", "status", "--json", "--results", folder)
    groups = [(one["by"], one["scored"]) for one in objects(done.stdout)]
    assert groups == [({}, 4), ({"status": "error"}, 0), ({"status": "ok"}, 4)]


def test_a_run_with_a_broken_file_is_scored_with_a_warning(run: Run, folder: str) -> None:
    (Path(folder) / "r1/samples/part-b.parquet").write_bytes(b"PAR1")
    done = run("score", "r1", "-m", "exact", "--json", "--results", folder)
    assert "part-b.parquet is skipped" in done.stderr
    assert objects(done.stdout)[0]["value"] == 0.75


def test_a_mixture_of_models_is_named(run: Run, tmp_path: Path) -> None:
    rows = answers(("a", "a"), ("b", "b"), ("c", "x"))
    for row, weights in zip(rows, ("old", "new", "new"), strict=True):
        row["model_fingerprint"] = weights
    make_run(tmp_path, rows)
    sentence = (
        "run r1 has answers of 2 versions of model 'demo' (weights new: 2 rows; weights old: 1 "
        "row): its figures are of a mixture"
    )
    words = ("score", "r1", "-m", "exact", "--results", str(tmp_path))
    done = run(*words)
    assert (done.exit_code, sentence in done.stderr) == (0, True), done.stderr
    assert sentence not in run(*words, "--quiet").stderr
    rows[0]["model_fingerprint"] = "new"
    make_run(tmp_path, rows)
    assert "versions" not in run(*words).stderr


def test_the_progress_of_each_metric_has_its_name(
    show: Show, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RowProgress, "_line_due", lambda *_: True)
    pattern = f"regex:[a{{1}}b]{'x?' * 30}"
    words = ("score", "r1", "-m", "exact", "-m", pattern, "--results", folder)
    lines = show(*words).err
    assert "exact: 5/5 rows, 0 s left" in lines and f"{pattern}: 5/5 rows" in lines
    shown = show(*words, terminal=True, columns=120).err
    assert "exact " in shown and f"{pattern[:29]}…" in shown
