"""The value that a metric gives a row, and its JSON form between processes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

MAX_TEXT = 2000  # characters of an answer, an explanation or an error that are kept
MAX_ERROR = 300

Row = Mapping[str, Any]  # columns of a result row that the metric asked for


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of a metric on one row.

    `value`: 1 and 0 for right and wrong, or a number. `answer`: what was compared. `statistics`:
    the parts of a figure that is no mean of values, see `jobs.scores.figures`.
    """

    value: float
    label: str | None = None
    answer: str | None = None
    explanation: str | None = None
    statistics: Sequence[float] | None = None

    def to_json(self) -> str:
        """One line of JSON. Raises ValueError for a value that is not finite."""
        if not math.isfinite(self.value):
            raise ValueError(f"the metric returned {self.value}, which is no finite number")
        content = asdict(self)
        for name in ("label", "answer", "explanation"):
            content[name] = shortened(content[name], MAX_TEXT)
        return json.dumps(content)


class Metric(Protocol):
    """Scores one row at a time. Raises any exception for a row that it can't score."""

    def score(self, row: Row) -> Outcome: ...


def shortened(text: str | None, limit: int) -> str | None:
    """At most `limit` characters of a text, which Parquet can hold: without lone surrogates."""
    if text is None:
        return None
    text = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return text.encode("utf-8", "replace").decode()


def verdict(right: bool, answer: str | None = None, explanation: str | None = None) -> Outcome:
    """The outcome of a metric that says right or wrong."""
    return Outcome(float(right), answer=answer, explanation=explanation)
