"""Figures and their intervals."""

from __future__ import annotations

import math
import random

import pyarrow as pa
import pytest

from jobs.results.scores import SCORES_SCHEMA
from jobs.scores.figures import bootstrap, figure_of
from jobs.scores.spec import parse_spec

EXACT = parse_spec("exact")


def table(values: list[float | None], rows: list[int] | None = None) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {"row_index": row, "status": "error" if value is None else "ok", "value": value}
            for row, value in zip(rows or range(len(values)), values, strict=True)
        ],
        schema=pa.schema([field.with_nullable(True) for field in SCORES_SCHEMA]),
    )


def test_the_mean_counts_scored_rows_alone() -> None:
    figure = figure_of(table([1.0, 0.0, 1.0, 1.0, None]), EXACT)
    assert (figure.value, figure.rows, figure.scored, figure.errors) == (0.75, 5, 4, 1)


def test_the_interval_is_near_the_normal_approximation() -> None:
    values = [1.0] * 300 + [0.0] * 700
    interval = figure_of(table([*values]), EXACT).interval
    assert interval is not None
    half = 1.96 * math.sqrt(0.3 * 0.7 / 1000)
    assert interval.low == pytest.approx(0.3 - half, abs=0.006)
    assert interval.high == pytest.approx(0.3 + half, abs=0.006)


def test_the_seed_alone_decides_and_not_the_order_of_rows() -> None:
    draws = random.Random(5)
    values: list[float | None] = [draws.random() for _ in range(50)]
    first = figure_of(table(values), EXACT, seed=1)
    assert figure_of(table(values), EXACT, seed=1) == first
    shuffled = list(enumerate(values))
    draws.shuffle(shuffled)
    rows, mixed = zip(*shuffled, strict=True)
    again = figure_of(table([*mixed], [*rows]), EXACT, seed=1)
    assert again.interval == pytest.approx(first.interval)
    assert figure_of(table(values), EXACT, seed=2).interval != first.interval


def test_samples_of_a_question_are_resampled_together() -> None:
    """Ten samples that all agree are no more evidence than one."""
    values: list[float | None] = [float(row % 2) for row in range(40)]
    once = figure_of(table(values), EXACT).interval
    repeated = figure_of(table(values * 10, [*range(40)] * 10), EXACT).interval
    assert repeated == pytest.approx(once)


def test_values_that_agree_have_an_interval_without_width() -> None:
    assert figure_of(table([1.0] * 9), EXACT).interval == (1.0, 1.0)


def test_one_question_has_no_interval_and_none_has_no_value() -> None:
    assert figure_of(table([1.0, 0.0], [3, 3]), EXACT).interval is None
    nothing = figure_of(table([None]), EXACT)
    assert (nothing.value, nothing.interval, nothing.errors) == (None, None, 1)


def test_blocks_of_draws_do_not_change_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [pa.array([float(one) for one in range(100)]), pa.array([1.0] * 100)]
    whole = bootstrap(values, lambda sums: sums[0] / sums[1], 0)
    monkeypatch.setattr("jobs.scores.figures.BLOCK_DRAWS", 700)
    parts = bootstrap(values, lambda sums: sums[0] / sums[1], 0)
    assert whole is not None and parts is not None
    assert parts == pytest.approx(whole, rel=0.03)
