"""Metrics of the log-probabilities that rows have: perplexity, and choice by likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jobs.errors import invalid
from jobs.scores.outcome import Outcome, Row, verdict
from jobs.scores.targets import target_of
from jobs.scores.text import letter_choice

UNITS = {"tokens": "scored_tokens", "bytes": "scored_bytes", "words": "scored_words"}
WAYS = ("sum", "tokens", "characters", "bytes")


class Perplexity:
    """exp of the negative mean log-probability per token, byte or word. The statistics are the sum
    of log-probabilities and the number of units."""

    def __init__(self, unit: str | None) -> None:
        if unit not in (None, *UNITS):
            raise invalid(f"{unit!r} is no unit of perplexity: {', '.join(UNITS)}", "metric")
        self._unit = unit or "tokens"

    def score(self, row: Row) -> Outcome:
        total, count = row.get("logprob_sum"), row.get(UNITS[self._unit])
        if total is None:
            raise ValueError("the row has no log-probabilities: run it with -o logprobs=true")
        if not count:
            raise ValueError(f"the row has no number of {self._unit}")
        return Outcome(perplexity((total, count)), statistics=(total, float(count)))


class Choice:
    """1 if the right choice was picked. A chat names its letter. Of a row with scored choices, the
    pick of the worker counts, or, with an argument, the most likely by `sum`, or per token,
    character or byte; its target is the text of the right one or its index."""

    def __init__(self, way: str | None) -> None:
        if way not in (None, *WAYS):
            raise invalid(f"{way!r} is no way to choose: {', '.join(WAYS)}", "metric")
        self._way = way

    def score(self, row: Row) -> Outcome:
        choices = row.get("choices")
        if choices:
            return self._of_scored(row, choices)
        if self._way is not None:
            raise ValueError("the row has no choices with scores")
        return letter_choice(row["text"], target_of(row))

    def _of_scored(self, row: Row, choices: Sequence[dict[str, Any]]) -> Outcome:
        texts = [str(one["text"]) for one in choices]
        right = index_of_target(target_of(row), texts)
        picked = row.get("picked_index") if self._way is None else most_likely(choices, self._way)
        if picked is None:
            raise ValueError("the row has choices without scores")
        return verdict(picked == right, texts[picked])


def index_of_target(target: str, texts: Sequence[str]) -> int:
    """The index of the right choice: of its text, else the number that the target is. Raises
    ValueError."""
    stripped = [one.strip() for one in texts]
    if target.strip() in stripped:
        return stripped.index(target.strip())
    if target.strip().isdecimal() and int(target) < len(texts):
        return int(target)
    raise ValueError(f"the target {target[:40]!r} is neither the text nor the index of a choice")


def most_likely(choices: Sequence[dict[str, Any]], way: str) -> int | None:
    """The index of the most likely choice; None if one has no score."""
    values: list[float] = []
    for one in choices:
        total, count = one["logprob_sum"], _length(one, way)
        if total is None or not count:
            return None
        values.append(total / count)
    return values.index(max(values))


def _length(choice: dict[str, Any], way: str) -> int | None:
    """The divisor of the log-probability of a choice; None or 0 if it is not known."""
    if way == "sum":
        return 1
    if way != "characters":
        length: int | None = choice[UNITS[way]]
        return length
    text, count = choice["text"], choice["scored_bytes"]
    # The text begins with the delimiter, whose bytes are not counted.
    return len(text.encode()[-count:].decode()) if text and count else None


def perplexity(sums: Sequence[float]) -> float:
    """exp(-log-probability / units); the greatest float instead of an overflow."""
    total, count = sums
    try:
        return math.exp(-total / count)
    except OverflowError:
        return float.fromhex("0x1.fffffffffffffp+1023")
