"""Throughput over the time of runs: rows and tokens that ended in each part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from jobs.report.measures import MICROSECONDS, Measures

PARTS = 48
LEAST_ROWS = 8  # fewer make no curve


@dataclass(frozen=True, slots=True)
class Timeline:
    """Rates in equal parts of the time since each run's first start. `seconds`: of one part.
    `rows`, `tokens`: of each run, per second, for the parts up to its end."""

    seconds: float
    rows: tuple[tuple[float, ...], ...]
    tokens: tuple[tuple[float, ...], ...]


def timeline(runs: Sequence[Measures]) -> Timeline | None:
    """None if no run has enough rows."""
    spans = [one.span() for one in runs]
    longest = max((end - start for start, end in (one for one in spans if one)), default=0)
    most = max((len(one.timed()) for one in runs), default=0)
    if most < LEAST_ROWS or not longest:
        return None
    parts = min(PARTS, most // 2)
    length = longest / parts  # microseconds
    rates = [_rates(one, length) for one in runs]
    seconds = length / MICROSECONDS
    return Timeline(seconds, tuple(one[0] for one in rates), tuple(one[1] for one in rates))


def _rates(run: Measures, length: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rows and tokens per second, in parts of `length` microseconds."""
    span = run.span()
    if span is None:
        return (), ()
    times = run.timed()
    parts = max(1, round((span[1] - span[0]) / length))
    places = pc.floor(pc.divide(pc.subtract(times["end"], span[0]).cast(pa.float64()), length))
    places = pc.min_element_wise(places, parts - 1).cast(pa.int64())
    table = pa.table({"place": places, "tokens": times["output_tokens"]})
    sums = table.group_by("place").aggregate([("tokens", "count"), ("tokens", "sum")])
    rows, tokens = [0.0] * parts, [0.0] * parts
    for one in sums.to_pylist():
        rows[one["place"]] = one["tokens_count"] * MICROSECONDS / length
        tokens[one["place"]] = one["tokens_sum"] * MICROSECONDS / length
    return tuple(rows), tuple(tokens)
