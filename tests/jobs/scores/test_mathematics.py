"""Mathematical equivalence."""

from __future__ import annotations

import pytest

from jobs.scores.mathematics import Math


@pytest.fixture(scope="module")
def metric() -> Math:
    return Math(None)


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        (r"The answer is $0.5$", r"\frac{1}{2}", 1),
        (r"so \boxed{\frac{2}{4}}", "1/2", 1),
        ("It is 1,000", "1000", 1),
        (r"$x^2 + 2x + 1$", r"$(x+1)^2$", 1),
        ("It is 7", "8", 0),
        ("no idea", "8", 0),
    ],
)
def test_known_pairs(metric: Math, text: str, target: str, value: float) -> None:
    assert metric.score({"text": text, "target": target}).value == value


def test_a_target_that_is_no_expression_is_an_error(metric: Math) -> None:
    with pytest.raises(ValueError, match="no mathematical expression"):
        metric.score({"text": "1", "target": " "})
