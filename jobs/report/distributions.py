"""Distributions of a number in several runs: common bins, and percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

BINS = 30
BINS_PER_DECADE = 8
WIDE = 100  # times the least value: the axis is logarithmic
PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and greatest value of a number in one run."""

    count: int
    mean: float
    percentiles: tuple[float, ...]
    maximum: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """A number in several runs. `edges`: of the bins, one more than there are bins. `shares`: of
    each run, the share of its values in each bin. `spreads`: of each run; None without values."""

    logarithmic: bool
    edges: tuple[float, ...]
    shares: tuple[tuple[float, ...], ...]
    spreads: tuple[Spread | None, ...]


def distribution(values: Sequence[Any], *, logarithmic: bool, whole: bool) -> Distribution | None:
    """The distribution of float arrays, one of each run; None if all are empty. `logarithmic`: bins
    have equal widths on a logarithmic axis, as also if the values span two decades. `whole`: values
    are whole numbers."""
    present = [one for one in values if len(one)]
    if not present:
        return None
    low = min(pc.min(one).as_py() for one in present)
    high = max(pc.max(one).as_py() for one in present)
    least = 1.0 if whole else _least_positive(present)
    logarithmic = logarithmic or high > WIDE * max(low, least)
    edges = _log_edges(max(low, least), high) if logarithmic else _edges(low, high, whole)
    return Distribution(
        logarithmic,
        edges,
        tuple(_shares(one, edges, logarithmic) for one in values),
        tuple(spread(one) for one in values),
    )


def spread(values: Any) -> Spread | None:
    """The summary of a float array; None if it is empty."""
    if not len(values):
        return None
    return Spread(
        len(values),
        pc.mean(values).as_py(),
        tuple(pc.quantile(values, list(PERCENTILES)).to_pylist()),
        pc.max(values).as_py(),
    )


def _least_positive(arrays: Sequence[Any]) -> float:
    """The least value above 0, which a logarithmic axis can begin with."""
    least = [pc.min(one.filter(pc.greater(one, 0))).as_py() for one in arrays]
    return min((one for one in least if one is not None), default=1e-6)


def _edges(low: float, high: float, whole: bool) -> tuple[float, ...]:
    """Edges at round numbers: 1, 2 or 5 times a power of ten apart."""
    rough = max((high - low) / BINS, 1 if whole else 1e-9)
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))
    first = math.floor(low / width)
    last = math.floor(high / width) + 1
    return tuple(number * width for number in range(first, last + 1))


def _log_edges(low: float, high: float) -> tuple[float, ...]:
    first = math.floor(math.log10(low) * BINS_PER_DECADE)
    last = math.floor(math.log10(max(high, low)) * BINS_PER_DECADE) + 1
    return tuple(10 ** (number / BINS_PER_DECADE) for number in range(first, last + 1))


def _shares(values: Any, edges: Sequence[float], logarithmic: bool) -> tuple[float, ...]:
    bins = len(edges) - 1
    if not len(values):
        return (0.0,) * bins
    if logarithmic:
        scaled = pc.log10(pc.max_element_wise(values, edges[0]))
        begin, end = math.log10(edges[0]), math.log10(edges[-1])
    else:
        scaled, begin, end = values, edges[0], edges[-1]
    places = pc.floor(pc.multiply(pc.subtract(scaled, begin), bins / (end - begin)))
    places = pc.max_element_wise(pc.min_element_wise(places, bins - 1), 0).cast(pa.int64())
    counts = {one["values"]: one["counts"] for one in places.value_counts().to_pylist()}
    return tuple(counts.get(number, 0) / len(values) for number in range(bins))
