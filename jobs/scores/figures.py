"""Figures of a metric over rows, with bootstrap confidence intervals.

Every figure is a function of sums over rows: a mean of the sum of values and the number of rows, a
corpus's BLEU of the statistics of its sentences. Rows of one question are resampled together, since
its samples are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from jobs.scores.likelihood import perplexity
from jobs.scores.spec import Spec

RESAMPLES = 1000
LEAST_RESAMPLES = 100
MAX_DRAWS = 200_000_000  # over all resamples: fewer resamples of many questions
BLOCK_DRAWS = 1_000_000  # at once
CONFIDENCE = 0.95

Combine = Callable[[Sequence[float]], float]  # sums over rows → a figure
Columns = Sequence[Any]  # one array of floats per sum, with an entry per question


class Interval(NamedTuple):
    low: float
    high: float


class Figure(NamedTuple):
    """A metric over rows. `value`: None if no row has one. `interval`: None for one question."""

    value: float | None
    interval: Interval | None
    rows: int
    scored: int
    no_answer: int
    errors: int


def figure_of(scores: Any, spec: Spec, seed: int = 0) -> Figure:
    """The figure of rows of the scores table, a pyarrow.Table."""
    counts = {one["values"]: one["counts"] for one in scores["status"].value_counts().to_pylist()}
    scored = scores.filter(pc.field("status") == "ok")
    value = interval = None
    if len(scored):
        combine, columns = combine_of(spec), questions(scored, spec)
        value = combine([pc.sum(one).as_py() for one in columns])
        interval = bootstrap(columns, combine, seed)
    return Figure(
        value,
        interval,
        len(scores),
        len(scored),
        counts.get("no_answer", 0),
        counts.get("error", 0),
    )


def combine_of(spec: Spec) -> Combine:
    """The formula of a metric's figure, from the sums of `statistics_of`."""
    if spec.samples is not None or spec.kind.figure == "mean":
        return lambda sums: sums[0] / sums[1]
    if spec.kind.figure == "perplexity":
        return perplexity
    from jobs.scores.translation import corpus_score, library_metric

    metric = library_metric(spec.name, spec.argument)
    return lambda sums: corpus_score(metric, sums)


def questions(scored: Any, spec: Spec) -> Columns:
    """The sums of each question, ordered by its row_index: the order of files does not matter."""
    parts = statistics_of(scored, spec)
    names = [f"s{number}" for number in range(len(parts))]
    table = pa.table({"row": scored["row_index"], **dict(zip(names, parts, strict=True))})
    table = table.group_by("row", use_threads=False).aggregate([(name, "sum") for name in names])
    table = table.sort_by("row")
    return [table[f"{name}_sum"].combine_chunks() for name in names]


def statistics_of(scored: Any, spec: Spec) -> list[Any]:
    """The summands of each row: its value and 1, or the metric's own statistics."""
    if spec.samples is not None or spec.kind.figure == "mean":
        return [scored["value"], pa.array([1.0] * len(scored))]
    lists = scored["statistics"].combine_chunks()
    width = len(lists[0])
    return [pc.list_element(lists, number) for number in range(width)]


def bootstrap(columns: Columns, combine: Combine, seed: int) -> Interval | None:
    """The percentile interval of a figure; None if there is one question. The same seed gives the
    same interval."""
    count = len(columns[0])
    if count < 2:
        return None
    resamples = max(LEAST_RESAMPLES, min(RESAMPLES, MAX_DRAWS // count))
    values: list[float] = []
    block = max(1, BLOCK_DRAWS // count)
    while len(values) < resamples:
        rounds = min(block, resamples - len(values))
        drawn = pc.random(rounds * count, initializer=(seed + len(values)) % 2**63)
        indices = pc.cast(pc.floor(pc.multiply(drawn, float(count))), pa.int64())
        indices = pc.min_element_wise(indices, count - 1)
        sums = [_sums(one.take(indices), rounds, count) for one in columns]
        values += [combine(one) for one in zip(*sums, strict=True)]
    values.sort()
    tail = (1 - CONFIDENCE) / 2
    return Interval(_quantile(values, tail), _quantile(values, 1 - tail))


def _sums(values: Any, rounds: int, count: int) -> list[float]:
    """The sums of `rounds` parts of equal size."""
    ends = pa.array(range(count - 1, rounds * count, count))
    totals = pc.cumulative_sum(values).take(ends).to_pylist()
    return [end - start for start, end in zip([0.0, *totals], totals, strict=False)]


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
