"""`chatjobs diff`: what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run, Show
from tests.cli.test_json import documented
from tests.jobs.scores.runs import answers, make_run


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> str:
    """Two runs that differ in two of three rows, scored by exact."""
    for name, texts in (("a", "xoy"), ("b", "xxo")):
        make_run(tmp_path, answers(*zip(texts, "xxy", strict=True)), name)
        run("score", name, "-m", "exact", "--results", str(tmp_path))
    return str(tmp_path)


def test_objects_of_metrics_come_before_those_of_rows(run: Run, folder: str) -> None:
    done = run("diff", "a", "b", "--json", "--by", "target", "--results", folder)
    assert done.exit_code == 0, done.output
    whole, *rest = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(whole) | set(rest[-1]) == documented("diff")
    assert (whole["runs"], whole["metric"], whole["by"]) == (["a", "b"], "exact", {})
    assert whole["values"] == [pytest.approx(2 / 3)] * 2
    assert (whole["delta"], whole["rose"], whole["fell"], whole["p_value"]) == (0, 1, 1, 1)
    assert [one["by"] for one in rest[:2]] == [{"target": "x"}, {"target": "y"}]
    assert [(one["row_index"], one["values"], one["texts"]) for one in rest[2:]] == [
        (1, [0, 1], ["o", "x"]),
        (2, [1, 0], ["y", "o"]),
    ]
    fewer = run("diff", "a", "b", "--json", "--rows", "0", "--results", folder)
    assert len(fewer.stdout.splitlines()) == 1


def test_the_table_fits_80_columns_and_names_what_it_leaves_out(show: Show, folder: str) -> None:
    done = show("diff", "a", "b", "--rows", "1", "--results", folder, terminal=True)
    assert done.code == 0
    assert all(len(line) <= 88 for line in done.out.splitlines())  # with the codes of bold text
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[1][:3] == ["exact", "0.6667", "0.6667"]
    assert lines[-1] == ["1", "exact", "0", "1", "x:", "o", "|", "x"]
    assert "1 more row with another value" in done.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a", "none"), "no run 'none'"),
        (("a", "b", "-m", "number"), "run a has no scores by number"),
        (("a", "b", "-m", "nothing"), "no metric 'nothing'"),
        (("a", "b", "--by", "topic"), "no column 'topic'"),
    ],
)
def test_what_can_not_be_compared_is_refused_with_a_sentence(
    run: Run, folder: str, words: tuple[str, ...], sentence: str
) -> None:
    done = run("diff", *words, "--results", folder)
    assert done.exit_code == 2
    assert sentence in done.stderr


def test_the_run_that_is_a_mixture_is_named(run: Run, folder: str) -> None:
    rows = answers(*zip("xxo", "xxy", strict=True))
    for row, kind in zip(rows, ("float32", "float32", "bfloat16"), strict=True):
        row |= {"model_fingerprint": "f", "dtype": kind}
    make_run(Path(folder), rows, "b")
    done = run("diff", "a", "b", "--results", folder)
    sentence = (
        "run b has answers of 2 versions of model 'demo' (dtype float32: 2 rows; dtype bfloat16: 1 "
        "row): its figures are of a mixture"
    )
    assert (done.exit_code, sentence in done.stderr) == (0, True), done.stderr
    assert "run a has answers" not in done.stderr
