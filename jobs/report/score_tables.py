"""The scores of several runs beside each other, with their intervals on a common axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jobs.results.files import Results
from jobs.scores.figures import Figure
from jobs.scores.freshness import stale_sentence
from jobs.scores.samples import read_groups
from jobs.scores.summary import Summary, summarise

MAX_GROUPS = 40  # of a metric

Group = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """A figure of one run. `run`: its place among the runs. `at`, `start`, `end`: the figure and
    its interval, in percent of the axis."""

    run: int
    figure: Figure
    at: float | None
    start: float | None
    end: float | None


@dataclass(frozen=True, slots=True)
class ScoreGroup:
    """The figures of the rows of a group. `label`: its name."""

    label: str
    lines: tuple[ScoreLine, ...]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """A metric: its groups, the first of which has all rows. `low`, `high`: the ends of the axis.
    `hidden`: groups that are left out. `stale`: sentences about runs that have changed since."""

    metric: str
    low: float
    high: float
    groups: tuple[ScoreGroup, ...]
    hidden: int
    stale: tuple[str, ...]


def score_tables(
    results: Results, runs: Sequence[str], by: Sequence[str], seed: int
) -> list[ScoreTable]:
    """A table for each metric that a run is scored by. Raises InvalidRequest for a column of `by`
    that a run does not have."""
    found: dict[str, dict[Group, dict[int, Figure]]] = {}
    stale: dict[str, list[str]] = {}
    for place, run in enumerate(runs):
        for one in _summaries(results, run, by, seed):
            metric = found.setdefault(one.metric, {})
            metric.setdefault(tuple(one.group.items()), {})[place] = one.figure
            if one.is_stale and not one.group:
                stale.setdefault(one.metric, []).append(stale_sentence(run, one.metric))
    return [_table(metric, groups, stale.get(metric, ())) for metric, groups in found.items()]


def _summaries(results: Results, run: str, by: Sequence[str], seed: int) -> Iterator[Summary]:
    groups = read_groups(results, run, by) if by else None
    if len(results.scores(run, columns=["metric"])):
        yield from summarise(results, run, (), groups, seed)


def _table(metric: str, groups: dict[Group, dict[int, Figure]], stale: Sequence[str]) -> ScoreTable:
    ordered = sorted(groups, key=lambda one: [(text is not None, text or "") for _, text in one])
    shown = ordered[: MAX_GROUPS + 1]
    low, high = _axis([figure for group in shown for figure in groups[group].values()])
    return ScoreTable(
        metric,
        low,
        high,
        tuple(
            ScoreGroup(
                ", ".join(f"{name}: {'none' if text is None else text}" for name, text in group)
                or "all rows",
                tuple(_line(run, one, low, high) for run, one in sorted(groups[group].items())),
            )
            for group in shown
        ),
        len(ordered) - len(shown),
        tuple(stale),
    )


def _line(run: int, figure: Figure, low: float, high: float) -> ScoreLine:
    def place(value: float) -> float:
        return round(100 * (value - low) / (high - low), 2)

    if figure.value is None:
        return ScoreLine(run, figure, None, None, None)
    interval = figure.interval or (figure.value, figure.value)
    return ScoreLine(run, figure, place(figure.value), place(interval[0]), place(interval[1]))


def _axis(figures: Sequence[Figure]) -> tuple[float, float]:
    """From 0 to 1 for figures that are shares, else from 0 to 100 or a little beyond the values."""
    ends = [0.0]
    for one in figures:
        ends += [] if one.value is None else [one.value]
        ends += one.interval or ()
    low, high = min(ends), max(ends)
    if high <= 1:
        return min(low, 0.0), 1.0
    return low, 100.0 if 50 < high <= 100 else high * 1.05
