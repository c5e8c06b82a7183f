"""Two runs compared: McNemar's test, deltas, flips."""

from __future__ import annotations

from math import comb
from pathlib import Path

import pytest

from jobs import Results
from jobs.errors import InvalidRequest
from jobs.results.run_json import RunJson
from jobs.scores.compare import check_data_set, common_specs, deltas, flips, mcnemar, read_pairs
from jobs.scores.process import Limits
from jobs.scores.samples import read_groups
from jobs.scores.scoring import score_run
from jobs.scores.spec import parse_spec
from tests.jobs.scores.runs import answers, make_run

RUNS = ("a", "b")


@pytest.mark.parametrize(
    ("rose", "fell", "p"),
    [
        (6, 16, 0.052479),  # a textbook's example: exact binomial test, P = 0.053
        (16, 6, 0.052479),
        (0, 5, 0.0625),
        (3, 3, 1.0),
        (1, 0, 1.0),
    ],
)
def test_published_p_values(rose: int, fell: int, p: float) -> None:
    assert mcnemar(rose, fell) == pytest.approx(p, abs=1e-6)


def test_p_is_the_sum_of_binomial_probabilities() -> None:
    # Approval ratings of Agresti (1990): 86 and 150 changed their minds
    exact = 2 * sum(comb(236, one) for one in range(87)) / 2**236
    assert mcnemar(86, 150) == pytest.approx(exact, rel=1e-9)
    for count in (1, 2, 9, 40):
        for rose in range(count + 1):
            tail = sum(comb(count, one) for one in range(min(rose, count - rose) + 1)) / 2**count
            assert mcnemar(rose, count - rose) == pytest.approx(min(1.0, 2 * tail))
    assert mcnemar(1_000_000, 1_001_000) == pytest.approx(0.4795, abs=1e-3)
    assert mcnemar(0, 100_000) == 0.0


def scored(root: Path, run: str, texts: list[str | None], metric: str = "exact") -> Results:
    rows = answers(*((text, target) for text, target in zip(texts, "xxyyz", strict=True)))
    for row, task in zip(rows, ["p", "p", "q", "q", "q"], strict=True):
        row["metadata"] = f'{{"task": "{task}"}}'
    results = make_run(root, rows, run)
    score_run(results, run, parse_spec(metric), Limits(), processes=1)
    return results


def test_rows_are_compared_by_their_keys(tmp_path: Path) -> None:
    scored(tmp_path, "a", ["x", "o", "y", "o", None])
    results = scored(tmp_path, "b", ["x", "x", "o", "y", "z"])
    (spec,) = common_specs(results, RUNS)
    pairs = read_pairs(results, RUNS, spec)
    assert pairs.alone == (0, 1)
    whole, first, second = deltas(pairs, read_groups(results, "a", ["task"]))
    assert (whole.rows, whole.first, whole.second, whole.delta) == (4, 0.5, 0.75, 0.25)
    assert (whole.rose, whole.fell, whole.p_value) == (2, 1, 1.0)
    assert whole.interval is not None
    assert whole.interval.low <= 0.25 <= whole.interval.high
    assert [(one.group, one.delta) for one in (first, second)] == [
        ({"task": "p"}, 0.5),
        ({"task": "q"}, 0.0),
    ]
    found = flips(results, RUNS, pairs)
    assert flips(results, RUNS, pairs, 1) == found[:1]
    assert [(one.row_index, one.values, one.texts) for one in found] == [
        (1, (0.0, 1.0), ("o", "x")),
        (2, (1.0, 0.0), ("y", "o")),
        (3, (0.0, 1.0), ("o", "y")),
    ]


def test_a_figure_of_a_corpus_is_that_of_the_common_rows(tmp_path: Path) -> None:
    from sacrebleu.metrics.chrf import CHRF

    scored(tmp_path, "a", ["x", "o", "y", "o", None], "chrf")
    results = scored(tmp_path, "b", ["x", "x", "o", "y", "z"], "chrf")
    (whole,) = deltas(read_pairs(results, RUNS, parse_spec("chrf")))
    expected = [CHRF().corpus_score([*texts], [[*"xxyy"]]).score for texts in ("xoyo", "xxoy")]
    assert [whole.first, whole.second] == pytest.approx(expected)


def test_runs_that_agree_have_no_p_value(tmp_path: Path) -> None:
    scored(tmp_path, "a", ["x", "o", "y", "o", "z"])
    results = scored(tmp_path, "b", ["x", "u", "y", "u", "z"])
    pairs = read_pairs(results, RUNS, parse_spec("exact"))
    (whole,) = deltas(pairs)
    assert (whole.delta, whole.p_value, whole.interval) == (0.0, None, (0.0, 0.0))
    assert flips(results, RUNS, pairs) == []


def test_what_can_not_be_compared_is_refused(tmp_path: Path) -> None:
    scored(tmp_path, "a", ["x", "o", "y", "o", "z"])
    results = scored(tmp_path, "b", ["x", "x", "o", "y", "z"], "contains")
    with pytest.raises(InvalidRequest, match=r"no metric in common \(a: exact; b: contains\)"):
        common_specs(results, RUNS)
    make_run(tmp_path, [{"text": "t", "target": "x"}], "bare")
    for runs in (("a", "bare"), ("bare", "a")):
        with pytest.raises(InvalidRequest, match="chatjobs score bare --metric exact makes"):
            common_specs(results, runs)
    with pytest.raises(InvalidRequest, match="run b has no scores by exact"):
        read_pairs(results, RUNS, parse_spec("exact"))
    other = make_run(tmp_path, [{"text": "t", "target": "x", "row_index": 77}], "c")
    score_run(other, "c", parse_spec("exact"), Limits(), processes=1)
    with pytest.raises(InvalidRequest, match="are they runs of one data set"):
        read_pairs(results, ("a", "c"), parse_spec("exact"))
    make_run(tmp_path, answers(*[("x", "other")] * 5), "d")
    score_run(other, "d", parse_spec("exact"), Limits(), processes=1)
    pairs = read_pairs(results, ("a", "d"), parse_spec("exact"))
    with pytest.raises(InvalidRequest, match="the target of row 0 is 'x' and 'other'"):
        check_data_set(results, ("a", "d"), pairs)


def test_data_sets_are_compared_by_their_content_then_by_their_targets(tmp_path: Path) -> None:
    """Without targets, values that agree would hide that the rows are others."""
    for run, content in (("a", "1"), ("b", "2"), ("c", "1")):
        for target in (None, "x"):
            name = f"{run}-{target}"
            results = make_run(tmp_path, answers(*[("x", target)] * 3), name)
            configuration = {"data set": {"content": content}}
            RunJson({"run_id": name, "configuration": configuration}).write(tmp_path / name)
            score_run(results, name, parse_spec("json"), Limits(), processes=1)

    def check(*runs: str) -> None:
        first, second = runs
        pairs = read_pairs(results, (first, second), parse_spec("json"))
        check_data_set(results, (first, second), pairs)

    check("a-None", "c-None")
    check("a-x", "b-x")  # another file, with the same rows as far as is known
    with pytest.raises(InvalidRequest, match="their files differ, and no row has a target"):
        check("a-None", "b-None")
    with pytest.raises(InvalidRequest, match="the target of row 0 is 'x' and None"):
        check("a-x", "b-None")
