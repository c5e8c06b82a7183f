"""Counts, times and distributions that a report is made of."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from jobs.report.distributions import distribution
from jobs.report.measures import read_measures
from jobs.report.timeline import timeline
from jobs.report.units import number_text, seconds_text, share_text
from tests.jobs.report.runs import failed, timed
from tests.jobs.scores.runs import make_run


def test_a_worker_is_busy_while_a_row_runs_and_each_worker_counts(tmp_path: Path) -> None:
    rows = [
        timed(0, 4),
        timed(1, 2),  # inside the first
        timed(10, 3),
        timed(12, 3),  # overlaps
        timed(1, 5, worker_id="other"),
        failed("timeout", "too slow"),
    ]
    measures = read_measures(make_run(tmp_path, rows), "r1")
    assert measures.busy_seconds == 4 + 5 + 5
    assert measures.elapsed_seconds == 15
    assert (measures.rows, measures.failed, measures.workers) == (6, 1, 2)
    assert (measures.input_tokens, measures.output_tokens) == (100, 50)
    assert measures.errors == {"timeout": 1}


def test_the_prompt_of_several_choices_counts_once(tmp_path: Path) -> None:
    rows = [timed(0, 1, row_index=0), timed(0, 1, row_index=0, choice_index=1)]
    measures = read_measures(make_run(tmp_path, rows), "r1")
    assert (measures.input_tokens, measures.output_tokens) == (20, 20)


def test_a_run_whose_rows_never_started_has_no_times(tmp_path: Path) -> None:
    results = make_run(tmp_path, [failed("timeout", "x"), {"status": "cancelled"}])
    measures = read_measures(results, "r1")
    assert (measures.busy_seconds, measures.elapsed_seconds) == (None, None)
    assert measures.errors == {"cancelled": 1, "timeout": 1}
    assert timeline([measures]) is None


def test_a_timeline_counts_each_row_and_token_once_and_shows_pauses(tmp_path: Path) -> None:
    rows = [timed(start, 1) for start in (*range(10), *range(90, 100))]
    long = read_measures(make_run(tmp_path, rows), "r1")
    short = read_measures(make_run(tmp_path, rows[:10], "r2"), "r2")
    data = timeline([long, short])
    assert data is not None
    assert sum(data.rows[0]) * data.seconds == pytest.approx(20)
    assert sum(data.tokens[0]) * data.seconds == pytest.approx(200)
    assert data.rows[0][5] == 0
    assert len(data.rows[1]) * data.seconds == pytest.approx(10, abs=data.seconds)


@pytest.mark.parametrize("values", [[3.0], [0.0, 0.0], [1.0, 2.0, 1000.0], [0.1, 0.25], [7.0] * 9])
@pytest.mark.parametrize("logarithmic", [True, False])
def test_every_value_is_in_a_bin(values: list[float], logarithmic: bool) -> None:
    found = distribution([pa.array(values)], logarithmic=logarithmic, whole=False)
    assert found is not None
    assert sum(found.shares[0]) == pytest.approx(1)
    assert [*found.edges] == sorted(set(found.edges))
    assert 2 <= len(found.edges) <= 100
    assert found.edges[-1] > max(values)


def test_runs_share_their_bins_and_empty_ones_are_marked() -> None:
    arrays = [pa.array([1.0, 2.0]), pa.array([], pa.float64()), pa.array([90.0])]
    found = distribution(arrays, logarithmic=False, whole=True)
    assert found is not None
    assert found.spreads[1] is None
    assert found.spreads[2] is not None
    assert found.spreads[2].percentiles == (90.0, 90.0, 90.0)
    assert {len(one) for one in found.shares} == {len(found.edges) - 1}
    assert distribution(arrays[1:2], logarithmic=False, whole=True) is None


def test_numbers_have_units_and_three_digits() -> None:
    times = [0, 2.5e-5, 0.0123, 0.9999, 4.56, 99.7, 200, 7500, 100_000]
    assert [seconds_text(one) for one in times] == [
        "0 s", "25.0 µs", "12.3 ms", "1.00 s", "4.56 s", "1 min 40 s", "3 min 20 s", "2 h 05 min",
        "1 d 4 h",
    ]  # fmt: skip
    assert [number_text(one) for one in (0, 0.0123, 99.96, 1234.5)] == [
        "0",
        "0.0123",
        "100",
        "1,234",
    ]
    assert [share_text(part, 10_000) for part in (0, 1, 9_999, 10_000)] == [
        "0 %", "< 0.1 %", "> 99.9 %", "100 %",
    ]  # fmt: skip
