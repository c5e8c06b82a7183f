"""Perplexity and choices by log-probability, against calculations by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from jobs.scores.likelihood import Choice, Perplexity, index_of_target, perplexity

ROW = {"logprob_sum": -6.0, "scored_tokens": 3, "scored_bytes": 12, "scored_words": 2}
CHOICES = [
    {"text": " yes", "logprob_sum": -2.0, "scored_tokens": 1, "scored_bytes": 4},
    {"text": " certainly not", "logprob_sum": -3.0, "scored_tokens": 3, "scored_bytes": 14},
]


@pytest.mark.parametrize(
    ("unit", "value"),
    [(None, math.exp(2)), ("bytes", math.exp(0.5)), ("words", math.exp(3))],
)
def test_perplexity_per_unit(unit: str | None, value: float) -> None:
    outcome = Perplexity(unit).score(ROW)
    assert outcome.value == pytest.approx(value)
    assert outcome.statistics is not None
    assert perplexity(outcome.statistics) == outcome.value


def test_a_perplexity_that_overflows_is_finite() -> None:
    assert math.isfinite(perplexity((-1e6, 1.0)))


def test_a_row_without_log_probabilities_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no log-probabilities"):
        Perplexity(None).score({"logprob_sum": None})


@pytest.mark.parametrize(("way", "picked"), [(None, 0), ("sum", 0), ("tokens", 1), ("bytes", 1)])
def test_the_most_likely_choice_by_each_way(way: str | None, picked: int) -> None:
    row = {"choices": CHOICES, "picked_index": 0, "text": " yes"}
    for target, index in (("yes", 0), ("certainly not", 1), ("0", 0), ("1", 1)):
        outcome = Choice(way).score({**row, "target": target})
        assert outcome.value == (picked == index)
        assert outcome.answer == CHOICES[picked]["text"]


def test_choices_are_normalised_as_lm_evaluation_harness_does() -> None:
    """Its acc, acc_norm and acc_bytes divide by 1, len(choice) and len(choice.encode()), of the
    choice as the task has it, without the target_delimiter."""
    given = {"a": -1.0, "wxyz": -3.5, "éé": -1.9}
    choices = [
        {
            "text": f" {text}",
            "logprob_sum": total,
            "scored_tokens": 1,
            "scored_bytes": len(text.encode()),
        }
        for text, total in given.items()
    ]
    picked = {}
    divisors: dict[str, Callable[[str], int]] = {
        "sum": lambda _: 1,
        "characters": len,
        "bytes": lambda text: len(text.encode()),
    }
    for way, length in divisors.items():
        ratios = {text: total / length(text) for text, total in given.items()}
        picked[way] = max(ratios, key=ratios.__getitem__)
        outcome = Choice(way).score({"choices": choices, "picked_index": 0, "target": picked[way]})
        assert outcome.value == 1, way
    assert len(set(picked.values())) == 3  # with the delimiter, "a" has the best acc_norm


def test_a_target_that_is_no_choice_is_an_error() -> None:
    with pytest.raises(ValueError, match="neither the text nor the index"):
        index_of_target("2", ["a", "b"])
    with pytest.raises(ValueError, match="no choices with scores"):
        Choice("sum").score({"text": "B", "target": "B"})
