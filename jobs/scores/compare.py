"""Compares the scores of two runs of one data set, row by row."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.errors import invalid
from jobs.results.files import Results
from jobs.results.run_json import RunJson
from jobs.results.scores import FIGURES, KEY
from jobs.scores.figures import Interval, bootstrap, combine_of, questions
from jobs.scores.samples import Groups, grouped
from jobs.scores.spec import Spec, parse_spec

COMPARED = ("status", "value", "statistics")
NEGLIGIBLE = 1e-18  # of a sum whose terms get smaller
SHOWN = ("text", "target", "custom_id")


@dataclass(frozen=True, slots=True)
class Delta:
    """The figures of a metric in two runs, over the rows that have a value in both.

    `rose` and `fell`: rows whose value is higher or lower in the second run. `p_value`: of
    McNemar's exact test, which is the sign test where values are not 0 and 1; None if no row
    differs. `interval`: of the difference; None if there is one question.
    """

    metric: str
    group: dict[str, str | None]
    rows: int
    first: float
    second: float
    interval: Interval | None
    rose: int
    fell: int

    @property
    def delta(self) -> float:
        return self.second - self.first

    @property
    def p_value(self) -> float | None:
        return mcnemar(self.rose, self.fell) if self.rose or self.fell else None


@dataclass(frozen=True, slots=True)
class Flip:
    """A row whose value differs between two runs, with the answer of each."""

    metric: str
    row_index: int
    repeat_index: int
    choice_index: int
    custom_id: str | None
    target: str | None
    values: tuple[float, float]
    texts: tuple[str | None, str | None]


@dataclass(frozen=True, slots=True)
class Pairs:
    """The rows that a metric has scored in two runs. `table`: a pyarrow.Table with the key, and
    the columns of COMPARED of the first run and, as `status_b` etc., of the second. `alone`: the
    rows of each run without a value in the other."""

    spec: Spec
    table: Any
    alone: tuple[int, int]

    @property
    def flipped(self) -> Any:
        """The rows of the table whose values differ."""
        return self.table.filter(pc.not_equal(self.table["value"], self.table["value_b"]))


def mcnemar(rose: int, fell: int) -> float:
    """The two-sided p-value of the exact test: the probability that of rose + fell fair coins at
    least as many agree."""
    count, least = rose + fell, min(rose, fell)
    if rose == fell:
        return 1.0
    scale = math.lgamma(count + 1) - count * math.log(2)
    tail = 0.0
    for one in range(least, -1, -1):
        term = math.exp(scale - math.lgamma(one + 1) - math.lgamma(count - one + 1))
        tail += term
        if term < tail * NEGLIGIBLE:
            break
    return min(1.0, 2 * tail)


def common_specs(results: Results, runs: tuple[str, str]) -> list[Spec]:
    """The metrics that both runs have scores of. Raises InvalidRequest if there are none."""
    found = [
        pc.unique(results.scores(run, columns=["metric"])["metric"]).to_pylist() for run in runs
    ]
    names = [name for name in found[0] if name in found[1]]
    if not names:
        said = "; ".join(
            f"{run}: {', '.join(one) or 'none'}" for run, one in zip(runs, found, strict=True)
        )
        behind = runs[1] if found[0] else runs[0]
        metric = next((one[0] for one in found if one), "exact")
        raise invalid(
            f"the runs have no metric in common ({said}): chatjobs score {behind} --metric "
            f"{shlex.quote(metric)} makes the scores of {behind}",
            "metric",
        )
    return [parse_spec(name) for name in names]


def read_pairs(results: Results, runs: tuple[str, str], spec: Spec) -> Pairs:
    """The rows of both runs by their keys. Raises InvalidRequest if a run has no scores by the
    metric, or no row has a value in both."""
    scored: list[Any] = []
    for run in runs:
        scores = results.scores(run, [spec.text], FIGURES)
        scores = scores.filter(pc.field("status") == "ok").select([*KEY, *COMPARED])
        scored.append(scores.append_column(f"place_{len(scored)}", _places(len(scores))))
    first, second = scored
    places = first.select([*KEY, "place_0"]).join(
        second.select([*KEY, "place_1"]), [*KEY], join_type="inner"
    )
    if not len(places):
        raise invalid(
            f"no row has a value by {spec.text} in both {runs[0]} and {runs[1]}: are they runs of "
            "one data set?",
            "run",
        )
    places = places.sort_by([(name, "ascending") for name in KEY])
    table = places.select([*KEY])
    for name in COMPARED:
        table = table.append_column(name, first[name].take(places["place_0"]))
    for name in COMPARED:
        table = table.append_column(f"{name}_b", second[name].take(places["place_1"]))
    return Pairs(spec, table, (len(first) - len(table), len(second) - len(table)))


def deltas(pairs: Pairs, groups: Groups | None = None, seed: int = 0) -> Iterator[Delta]:
    """The comparison over all rows, then by group of the first run's samples."""
    yield _delta(pairs.spec, {}, pairs.table, seed)
    if groups is not None:
        for group, rows in grouped(pairs.table, groups):
            yield _delta(pairs.spec, group, rows, seed)


def check_data_set(results: Results, runs: tuple[str, str], pairs: Pairs) -> None:
    """Raise InvalidRequest if the runs are not of one data set, or a run.json can't be read.

    Files with equal content are one. Others are if each row has the same target in both, and some
    have one. Of files that are not known, only rows whose values differ are compared.
    """
    first, second = (RunJson.read(results.path(run)).data_set for run in runs)
    known = first is not None and second is not None
    if known and first == second:
        return
    fact = f"{runs[0]} and {runs[1]} are not runs of one data set"
    table, targets = pairs.table if known else pairs.flipped, False
    before, after = (_samples(results, run, table["row_index"], ["target"]) for run in runs)
    for row in table.select([*KEY]).to_pylist():
        key = tuple(row.values())
        one, other = (rows.get(key, {}).get("target") for rows in (before, after))
        targets |= one is not None
        if one != other:
            raise invalid(
                f"{fact}: the target of row {row['row_index']} is {one!r} and {other!r}", "run"
            )
    if known and not targets:
        raise invalid(f"{fact}: their files differ, and no row has a target", "run")


def flips(
    results: Results, runs: tuple[str, str], pairs: Pairs, limit: int | None = None
) -> list[Flip]:
    """The first `limit` rows whose values differ, in the order of the data set."""
    table = pairs.flipped.slice(0, limit)
    first, second = (_samples(results, run, table["row_index"], SHOWN) for run in runs)
    found = []
    for row in table.select([*KEY, "value", "value_b"]).to_pylist():
        key = tuple(row[name] for name in KEY)
        one, other = first.get(key, {}), second.get(key, {})
        found.append(
            Flip(
                metric=pairs.spec.text,
                row_index=row["row_index"],
                repeat_index=row["repeat_index"],
                choice_index=row["choice_index"],
                custom_id=one.get("custom_id"),
                target=one.get("target"),
                values=(row["value"], row["value_b"]),
                texts=(one.get("text"), other.get("text")),
            )
        )
    return found


def _delta(spec: Spec, group: dict[str, str | None], table: Any, seed: int) -> Delta:
    combine = combine_of(spec)
    first = questions(table, spec)
    second = questions(
        table.select(["row_index"])
        .append_column("value", table["value_b"])
        .append_column("statistics", table["statistics_b"]),
        spec,
    )
    width = len(first)
    sums = [pc.sum(one).as_py() for one in (*first, *second)]
    return Delta(
        spec.text,
        group,
        len(table),
        combine(sums[:width]),
        combine(sums[width:]),
        bootstrap(
            [*first, *second], lambda drawn: combine(drawn[width:]) - combine(drawn[:width]), seed
        ),
        pc.sum(pc.less(table["value"], table["value_b"])).as_py(),
        pc.sum(pc.greater(table["value"], table["value_b"])).as_py(),
    )


def _samples(
    results: Results, run: str, indices: Any, columns: Sequence[str]
) -> dict[tuple[int, ...], dict[str, Any]]:
    """Columns of rows of the data set, by key."""
    rows = results.dataset(run)
    table = rows.to_table([*KEY, *columns], filter=pc.field("row_index").isin(pc.unique(indices)))
    return {tuple(row[name] for name in KEY): row for row in table.to_pylist()}


def _places(count: int) -> Any:
    return pa.array(range(count), pa.int64())
