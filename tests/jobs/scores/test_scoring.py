"""Runs that are scored: order, processes, operations of every kind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jobs import Results
from jobs.scores.figures import figure_of
from jobs.scores.process import Limits
from jobs.scores.scoring import score_run
from jobs.scores.spec import parse_spec
from tests.jobs.scores.runs import answers, make_run


def test_several_processes_keep_each_value_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def number(row): return int(row['text'])\n")
    results = make_run(tmp_path, answers(*((str(row), None) for row in range(1500))))
    spec = parse_spec(f"{file}:number")
    done: list[int] = []
    tally = score_run(results, "r1", spec, Limits(), processes=3, progress=done.append)
    assert (tally.rows, tally.failed, done[-1]) == (1500, 0, 1500)
    scores = results.scores("r1")
    assert scores["row_index"].to_pylist() == scores["value"].to_pylist()


def test_an_error_in_many_rows_is_counted_and_quoted_a_few_times(tmp_path: Path) -> None:
    results = make_run(tmp_path, answers(*[("1", "x")] * 20, ("1", "1")))
    tally = score_run(results, "r1", parse_spec("number"), Limits(), processes=1)
    assert (tally.rows, tally.failed, len(tally.errors)) == (21, 20, 5)
    assert tally.errors[0] == "row 0: the target 'x' holds no number"


def test_rows_without_an_answer_have_no_value(tmp_path: Path) -> None:
    results = make_run(tmp_path, answers((None, "a"), ("a", "a"), ("b", "b")))
    score_run(results, "r1", parse_spec("exact"), Limits(), processes=1)
    rows = results.scores("r1").to_pylist()
    assert [(row["status"], row["value"]) for row in rows] == [
        ("no_answer", None),
        ("ok", 1.0),
        ("ok", 1.0),
    ]


def test_picks_of_scoring_jobs_and_their_likelihoods_are_scored(tmp_path: Path) -> None:
    choices = [
        {"text": text, "logprob_sum": total, "scored_tokens": 1, "scored_bytes": len(text)}
        for text, total in (("yes", -1.0), ("no, never", -2.0))
    ]
    rows = [
        {"operation": "choice", "choices": choices, "picked_index": 0, "text": "yes"}
        | {"target": target}
        for target in ("yes", "1")
    ]
    results = make_run(tmp_path, rows)
    for metric, values in (("choice", [1.0, 0.0]), ("choice:bytes", [0.0, 1.0])):
        spec = parse_spec(metric)
        score_run(results, "r1", spec, Limits(), processes=1)
        assert results.scores("r1", [spec.text])["value"].to_pylist() == values


def test_the_perplexity_of_a_run_is_that_of_all_its_tokens(tmp_path: Path) -> None:
    results: Results = make_run(
        tmp_path,
        [
            {"operation": "perplexity", "logprob_sum": total, "scored_tokens": tokens}
            for total, tokens in ((-2.0, 1), (-3.0, 4))
        ],
    )
    spec = parse_spec("perplexity")
    score_run(results, "r1", spec, Limits(), processes=1)
    scores = results.scores("r1")
    assert scores["value"].to_pylist() == pytest.approx([math.exp(2), math.exp(0.75)])
    assert figure_of(scores, spec).value == pytest.approx(math.exp(1))
