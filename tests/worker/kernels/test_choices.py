"""Choices between ways of computing are measured per machine and lead to the fastest way."""

from __future__ import annotations

import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worker.kernels import attention, build, choices, dense, quantised
from worker.kernels.build import Level
from worker.kernels.choices import (
    APART_SECONDS,
    MOST_MEASUREMENTS,
    ROUNDS,
    Choices,
    Measurement,
    Times,
)
from worker.kernels.dense import Way
from worker.kernels.library import Library
from worker.layers.weights import bf16
from worker.layers.weights.dense import linear

ROWS = (2, 4, 8, 16)
NAME = "rows of a test"
times = st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The choices in a cache that has the compiled kernels and no choices yet."""
    compiled = build.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "chatjobs" / "kernels"
    cache.mkdir(parents=True)
    for path in compiled.iterdir():
        if path.name != "choices":
            (cache / path.name).symlink_to(path)
    choices.of.cache_clear()  # what tests before this one have measured in this process
    yield cache / "choices"
    choices.of.cache_clear()


def measurement(number: int, is_clear: bool = True) -> Measurement:
    """One by which all other numbers are much worse."""
    return Measurement({number: 1.0}, is_clear)


def number(found: int) -> int:
    """What another process of this machine gets if it would measure `found`."""
    return Choices("avx2", 2).get(NAME, lambda: measurement(found))


class Machine:
    """Processes that start one after the other, an hour apart."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.measured = 0

    def start(self, found: int | Measurement, after: float = 3600) -> int:
        """What the next process gets if it would measure `found`."""

        def measure() -> Measurement:
            self.measured += 1
            return measurement(found) if isinstance(found, int) else found

        self.now += after
        return Choices("avx2", 2, lambda: self.now).get(NAME, measure)


def crossing(first: list[float], second: list[float]) -> int:
    return Measurement.of([[first, second]], partial(choices.crossing, ROWS)).number


@pytest.mark.parametrize(
    ("first", "second", "most"),
    [
        ([1, 1, 1, 1], [2, 2, 2, 2], 16),
        ([2, 2, 2, 2], [1, 1, 1, 1], 0),
        ([1, 1, 3, 6], [2, 2, 2, 2], 4),
        ([1, 2.1, 1, 6], [2, 2, 2, 2], 8),  # one time was disturbed
        ([1, 1, 1, 1], [1, 1, 1, 1], 16),
    ],
)
def test_the_first_way_is_used_up_to_where_the_second_is_faster(
    first: list[float], second: list[float], most: int
) -> None:
    assert crossing(first, second) == most


@given(first=times, second=times)
def test_no_other_number_of_rows_costs_less(first: list[float], second: list[float]) -> None:
    def cost(most: int) -> float:
        return sum(
            (a if rows <= most else b) / min(a, b)
            for rows, a, b in zip(ROWS, first, second, strict=True)
        )

    best = min(cost(most) for most in (0, *ROWS))
    assert cost(crossing(first, second)) == pytest.approx(best)


def rounds_of(*disturbed: Times) -> list[Times]:
    """Rounds in which the first way takes half of the time of the second, but for these."""
    return [*disturbed, *[[[1.0], [2.0]]] * (ROUNDS - len(disturbed))]


BUSY: Times = [[9.0], [2.0]]  # another program had a core


@pytest.mark.parametrize(
    ("rounds", "is_clear"),
    [
        (rounds_of(), True),
        (rounds_of(BUSY), True),
        (rounds_of(BUSY, BUSY), False),
        ([[[1.0], [1.05]], [[1.05], [1.0]]] * ROUNDS, True),  # either will do
    ],
)
def test_a_measurement_is_clear_if_all_rounds_but_one_agree(
    rounds: list[Times], is_clear: bool
) -> None:
    found = Measurement.of(rounds, choices.either)
    assert (found.number, found.is_clear) == (1, is_clear)
    swapped = Measurement.of([[second, first] for first, second in rounds], choices.either)
    assert swapped.is_clear == is_clear


def test_an_always_disturbed_way_seems_the_slower_one() -> None:
    """Why one measurement does not settle a choice."""
    assert Measurement.of([BUSY] * ROUNDS, choices.either) == Measurement({1: 4.5, 0: 1.0}, True)


class Clock:
    """The time that ways take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(choices, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def passes(self, pause: float) -> None:
        self.now += pause


@pytest.mark.parametrize(("first", "second", "found"), [(1, 2, 1), (2, 1, 0), (1, 1, 1)])
def test_of_two_ways_the_faster_one_is_preferred(
    monkeypatch: pytest.MonkeyPatch, first: float, second: float, found: int
) -> None:
    clock = Clock(monkeypatch)
    ways = (partial(clock.passes, first), partial(clock.passes, second))
    assert choices.compare(*ways).number == found


@pytest.mark.usefixtures("folder")
def test_attention_multiplies_as_was_measured(
    kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def compare(pairs: Callable[[], None], floats: Callable[[], None]) -> Measurement:
        pairs()
        floats()
        seen.append(bool(seen))
        return measurement(seen[-1])

    monkeypatch.setattr(choices, "compare", compare)
    found = attention.fastest_way.__wrapped__()
    if not kernels.level.has_pairs:
        assert (found, seen) == (attention.Way(False, False), [])
    else:
        assert (found, seen) == (attention.Way(False, True), [False, True])
        assert attention.fastest_way.__wrapped__() == found
        assert len(seen) == 2


@pytest.mark.usefixtures("kernels")
def test_attention_is_measured_both_ways() -> None:
    """Where there is one only, it is measured twice."""
    assert attention._prefers_pairs_of_tokens().number in (1, 0)
    assert attention._prefers_pairs_of_chunks().number in (1, 0)


def test_each_way_multiplies_with_all_weights_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []
    clock = Clock(monkeypatch)

    def function(name: str, pause: float) -> Callable[[Tensor], None]:
        def multiply(x: Tensor) -> None:
            seen.append((name, len(x)))
            clock.passes(pause * len(x))

        return multiply

    ways = [[function("a1", 1), function("a2", 2)], [function("b", 10)]]
    found = choices.seconds(ways, (1, 3))
    assert seen[:4] == [("a1", 1), ("b", 1), ("a2", 1), ("b", 1)]
    assert len(seen) == 2 * 2 * ROUNDS and seen[-1] == ("b", 3)
    assert found[:2] == [[[1, 6], [10, 30]], [[2, 3], [10, 30]]], "ROUNDS is odd"


def test_processes_that_start_together_have_one_measurement(folder: Path) -> None:
    assert number(5) == number(7) == 5
    assert Choices("avx2", 4).get(NAME, lambda: measurement(9)) == 9, "other threads"
    assert Choices("avx2", 2).get("another", lambda: measurement(3)) == 3
    assert number(8) == 5
    assert len([*folder.glob("*.json")]) == 2


def test_one_process_measures_while_others_wait(folder: Path) -> None:
    measured = []
    together = Barrier(2)

    def start(number: int) -> int:
        def measure() -> Measurement:
            measured.append(number)
            with suppress(BrokenBarrierError):
                together.wait(0.5)  # for another one that measures meanwhile
            return measurement(number)

        return Choices("avx2", 2).get(NAME, measure)

    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(start, range(40)))
    assert found == set(measured) and len(measured) == 1


def test_a_process_that_is_frozen_while_it_measures_stops_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number(5)
    (path,) = folder.glob("*.json")
    path.unlink()
    monkeypatch.setattr(choices, "LOCK_SECONDS", 0)
    with open(path.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert number(6) == number(7) == 6


@pytest.mark.usefixtures("folder")
def test_two_loads_that_agree_make_a_choice_final() -> None:
    machine = Machine()
    assert [machine.start(5), machine.start(5)] == [5, 5]
    assert [machine.start(8) for _ in range(9)] == [5] * 9
    assert machine.measured == 2


@pytest.mark.usefixtures("folder")
def test_a_load_soon_after_another_one_counts_for_none() -> None:
    machine = Machine()
    assert machine.start(5) == machine.start(6, after=APART_SECONDS - 1) == 5
    assert machine.start(7, after=1) == 7


@pytest.mark.usefixtures("folder")
def test_a_wrong_first_measurement_is_corrected_by_later_loads() -> None:
    machine = Machine()
    assert [machine.start(found) for found in (0, 1, 1, 0, 0)] == [0, 1, 1, 1, 1]
    assert machine.measured == 3


@pytest.mark.usefixtures("folder")
def test_an_unclear_measurement_is_used_until_there_is_a_clear_one() -> None:
    machine = Machine()
    assert machine.start(measurement(0, is_clear=False)) == 0
    assert machine.start(1) == 1
    assert machine.start(measurement(0, is_clear=False)) == 1, "it changes no clear one"
    assert machine.start(1) == machine.start(0) == 1
    assert machine.measured == 4


@pytest.mark.parametrize("is_clear", [True, False])
@pytest.mark.usefixtures("folder")
def test_a_machine_that_is_always_busy_measures_a_limited_number_of_times(is_clear: bool) -> None:
    machine = Machine()
    found = [machine.start(measurement(one % 2, is_clear)) for one in range(20)]
    assert machine.measured == MOST_MEASUREMENTS
    assert len(set(found[MOST_MEASUREMENTS - 1 :])) == 1


@pytest.mark.usefixtures("folder")
def test_of_unclear_measurements_the_median_is_used() -> None:
    machine = Machine()
    unclear = (measurement(one, is_clear=False) for one in (48, 8, 12, 6, 10))
    assert [machine.start(one) for one in unclear][-1] == machine.start(20) == 10


@pytest.mark.usefixtures("folder")
def test_a_number_that_is_nearly_as_good_as_the_best_one_stays() -> None:
    machine = Machine()
    near, far = Measurement({8: 1.05, 12: 1.0}, True), Measurement({8: 1.2, 12: 1.0}, True)
    assert [machine.start(8), machine.start(near), machine.start(far)] == [8, 8, 8]
    assert machine.measured == 2
    other = Choices("avx2", 4, lambda: machine.now)
    assert other.get(NAME, lambda: measurement(8)) == 8
    machine.now += APART_SECONDS
    assert Choices("avx2", 4, lambda: machine.now).get(NAME, lambda: far) == 12


@pytest.mark.usefixtures("folder")
def test_a_clock_that_was_set_back_stops_no_measurement() -> None:
    machine = Machine()
    assert [machine.start(5), machine.start(6, after=-1_000_000)] == [5, 6]


@pytest.mark.usefixtures("folder")
def test_a_process_keeps_to_its_choice() -> None:
    machine = Machine()
    process = Choices("avx2", 2, lambda: machine.now)
    assert process.get(NAME, lambda: measurement(5)) == 5
    assert machine.start(6) == 6
    assert process.get(NAME, lambda: measurement(7)) == 5


@pytest.mark.usefixtures("folder")
def test_the_log_says_what_was_chosen_and_whether_it_is_final(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine()
    machine.start(5)
    assert f"{NAME}: 5, measured again by a later start" in caplog.text
    machine.start(5)
    assert f"{NAME}: 5, final" in caplog.text


def test_processes_that_measure_other_names_meanwhile_lose_none(folder: Path) -> None:
    def measure(name: str) -> int:
        return Choices("avx2", 2).get(name, lambda: measurement(5))

    names = [f"name {i}" for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(measure, names)) == {5}
    (path,) = folder.glob("*.json")
    assert sorted(json.loads(path.read_text())) == sorted(names)


@pytest.mark.parametrize(
    "written",
    [
        5,  # by the first versions, after one measurement
        None,
        {},
        {"clear": [5, 5], "unclear": []},
        {"clear": [-1], "unclear": [], "measured_at": 0},
        {"clear": [True], "unclear": [], "measured_at": 0},
        {"clear": ["5"], "unclear": [], "measured_at": 0},
        {"clear": "55", "unclear": [], "measured_at": 0},
        {"clear": 5, "unclear": [], "measured_at": 0},
        {"clear": [5], "unclear": [], "measured_at": None},
        {"clear": [], "unclear": [], "measured_at": 0},
        {"clear": [5], "unclear": [], "measured_at": 0, "more": 1},
    ],
)
def test_what_no_process_has_written_is_measured_again(folder: Path, written: Any) -> None:
    number(5)
    (path,) = folder.glob("*.json")
    path.write_text(json.dumps({NAME: written}))
    assert number(6) == number(7) == 6


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_file_is_measured_again(folder: Path, text: str) -> None:
    number(5)
    (path,) = folder.glob("*.json")
    path.write_text(text)
    assert number(6) == number(7) == 6


def test_a_number_that_is_no_choice_is_kept_at_once(folder: Path) -> None:
    kept = Choices("cuda", 0)
    assert kept.known("bytes") is None
    kept.keep("bytes", 5)
    Choices("cuda", 0).keep("bytes", 7)
    assert kept.known("bytes") == 5
    (path,) = folder.glob("*.json")
    path.write_text('{"bytes": -5}')
    assert kept.known("bytes") is None
    kept.keep("bytes", 7)
    assert kept.known("bytes") == 7


def test_a_folder_that_can_not_be_written_is_said_and_each_start_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert (number(5), number(7)) == (5, 7)
    assert "choices are measured at each start, because they can't be kept" in caplog.text


@pytest.mark.usefixtures("kernels", "folder")  # in this order: the kernels are in the user's cache
def test_weights_use_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real measurement, with little memory: it is not kept for the user's models."""
    monkeypatch.setattr(choices, "WEIGHT_BYTES", 1 << 22)
    choices.of.cache_clear()
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    way = dense.Matrices([weight]).way
    assert way.few >= dense.LEAST_UNPACKED
    assert dense.Matrices([weight]).way == way
    assert bf16.most_rows() in (0, dense.LEAST_UNPACKED, *bf16.MEASURED_ROWS)
    assert dense.Matrices([weight], Way(False, 9)).way == Way(False, 9)
    choices.of.cache_clear()


@pytest.mark.usefixtures("kernels", "folder")
def test_where_torch_is_always_faster_a_token_and_its_draft_have_the_bits_of_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "seconds", lambda ways, rows: [[[1.0] * len(rows)] * len(ways)])
    monkeypatch.setattr(choices, "crossing", lambda rows, times: {0: 1.0})
    choices.of.cache_clear()
    x, half = (torch.randn(rows, 256).to(torch.bfloat16) for rows in (6, 64))
    x, values = x.repeat(1, 2), torch.cat([half, -half], 1)  # the sums are errors of rounding
    weight = bf16.Bf16Weight(values)
    for rows in range(2, dense.LEAST_UNPACKED + 1):
        alone = torch.cat([weight(x[row : row + 1], None) for row in range(rows)])
        assert torch.equal(weight(x[:rows], None), alone), f"{rows} rows"
    assert torch.equal(weight(x, None), linear(x, values)), "the rest is multiplied by torch"
    choices.of.cache_clear()


@pytest.mark.parametrize(
    "other", [build.AVX512VNNI, build.AVX512, build.AMX], ids=attrgetter("name")
)
def test_the_measurements_of_other_levels_run_on_this_one(
    kernels: Library, folder: Path, monkeypatch: pytest.MonkeyPatch, other: Level
) -> None:
    """A level that has one way only measures it twice: the numbers mean nothing."""
    name = other.name
    monkeypatch.setattr(choices, "WEIGHT_BYTES", 1 << 22)
    monkeypatch.setattr(kernels, "level", replace(other, flags=kernels.level.flags))
    choices.of.cache_clear()
    way = dense.fastest_way()
    assert way.few in (dense.LEAST_UNPACKED, *dense.MEASURED_ROWS)
    assert way.pairs or name != "amx"
    assert other.has_pairs or not way.pairs
    wide = quantised.fastest_wide_rows()
    limits = (quantised.LEAST_WIDE_ROWS, *(rows + 1 for rows in quantised.MEASURED_ROWS))
    assert wide in (limits if name == "amx" else (quantised.UNLIMITED,))
    choices.of.cache_clear()
