"""pass@k, against the definition of Chen et al. 2021."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from jobs.errors import InvalidRequest
from jobs.scores.pass_at_k import estimate
from jobs.scores.process import Limits
from jobs.scores.scoring import score_run
from jobs.scores.spec import parse_spec
from tests.jobs.scores.runs import make_run


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_it_is_the_share_of_subsets_with_a_right_sample(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations(range(n), k))
            share = sum(any(sample < c for sample in one) for one in subsets) / len(subsets)
            assert estimate(n, c, k) == pytest.approx(share)


def test_it_is_stable_for_many_samples() -> None:
    assert estimate(200, 1, 100) == pytest.approx(0.5)
    assert estimate(100_000, 0, 10) == 0.0


def test_rows_of_a_question_count_together(tmp_path: Path) -> None:
    rows = [
        {"row_index": row, "choice_index": choice, "text": text, "target": "a"}
        for row, texts in enumerate(["ab", "bb", "a"])
        for choice, text in enumerate(texts)
    ]
    results = make_run(tmp_path, rows)
    for metric in ("exact", "pass@2:exact"):
        score_run(results, "r1", parse_spec(metric), Limits(), processes=1)
    spec = parse_spec("pass@2:exact")
    table = results.scores("r1", [spec.text]).to_pylist()
    assert [(one["row_index"], one["value"]) for one in table] == [(0, 1.0), (1, 0.0), (2, None)]
    assert table[2]["error"] == (
        "1 sample has a score, and pass@2 needs 2: chatjobs run --num-samples 2 makes them"
    )


def test_a_metric_with_other_values_is_refused(tmp_path: Path) -> None:
    results = make_run(tmp_path, [{"text": "ab", "target": "a"}])
    score_run(results, "r1", parse_spec("edit"), Limits(), processes=1)
    with pytest.raises(InvalidRequest, match="right or wrong, and edit has the value"):
        score_run(results, "r1", parse_spec("pass@1:edit"), Limits())
