"""Choices between ways of computing are measured once per machine and lead to the fastest way."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from worker.kernels import attention, build, choices, dense, quantised
from worker.kernels.choices import Choices
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


def number(found: int) -> int:
    """What another process of this machine gets if it would measure `found`."""
    return Choices("avx2", 2).get(NAME, lambda: found)


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
    assert choices.crossing(ROWS, first, second) == most


@given(first=times, second=times)
def test_no_other_number_of_rows_costs_less(first: list[float], second: list[float]) -> None:
    def cost(most: int) -> float:
        return sum(
            (a if rows <= most else b) / min(a, b)
            for rows, a, b in zip(ROWS, first, second, strict=True)
        )

    assert cost(choices.crossing(ROWS, first, second)) == min(cost(most) for most in (0, *ROWS))


def test_of_two_ways_the_faster_one_is_preferred() -> None:
    def way(*pauses: float) -> Callable[[], None]:
        left = list(pauses)
        return lambda: time.sleep(left.pop())

    slow, disturbed = (0.01,) * choices.ROUNDS, (0.05,) * (choices.ROUNDS - 1)
    assert choices.prefers_first(way(0, *disturbed), way(*slow))
    assert not choices.prefers_first(way(*slow), way(0, *disturbed))


@pytest.mark.usefixtures("folder")
def test_attention_multiplies_as_was_measured(
    kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def first(pairs: Callable[[], None], floats: Callable[[], None]) -> bool:
        pairs()
        floats()
        seen.append(bool(seen))
        return seen[-1]

    monkeypatch.setattr(choices, "prefers_first", first)
    found = attention.fastest_way.__wrapped__()
    if kernels.level.name == "avx2":
        assert (found, seen) == (attention.Way(False, False), [])
    else:
        assert (found, seen) == (attention.Way(False, True), [False, True])
        assert attention.fastest_way.__wrapped__() == found
        assert len(seen) == 2


@pytest.mark.usefixtures("kernels")
def test_attention_is_measured_both_ways() -> None:
    """AVX2 has one, which is measured twice."""
    assert attention._prefers_pairs_of_tokens() in (True, False)
    assert attention._prefers_pairs_of_chunks() in (True, False)


def test_each_way_multiplies_with_all_weights_in_turn() -> None:
    seen: list[tuple[str, int]] = []

    def function(name: str, pause: float = 0) -> Callable[[Tensor], None]:
        def multiply(x: Tensor) -> None:
            seen.append((name, len(x)))
            time.sleep(pause)

        return multiply

    ways = [[function("a1"), function("a2")], [function("b", 0.01)]]
    found = choices.seconds(ways, (1, 3))
    assert seen[:4] == [("a1", 1), ("b", 1), ("a2", 1), ("b", 1)]
    assert len(seen) == 2 * 2 * choices.ROUNDS and seen[-1] == ("b", 3)
    assert min(found[1]) >= 0.01


def test_a_number_is_measured_once_per_machine(folder: Path) -> None:
    assert number(5) == number(7) == 5
    assert Choices("avx2", 4).get(NAME, lambda: 9) == 9, "for another number of threads"
    assert Choices("avx2", 2).get("another", lambda: 3) == 3
    assert number(8) == 5
    files = folder.glob("*.json")
    assert sorted(sum(json.loads(path.read_text()).values()) for path in files) == [8, 9]


@pytest.mark.parametrize("first", [True, False])
def test_the_preferred_one_of_two_ways_is_kept(folder: Path, first: bool) -> None:
    assert Choices("avx512", 2).get("pairs", lambda: first) == first
    assert Choices("avx512", 2).get("pairs", lambda: not first) == first


def test_processes_that_measure_other_names_meanwhile_lose_none(folder: Path) -> None:
    def measure(name: str) -> int:
        return Choices("avx2", 2).get(name, lambda: 5)

    names = [f"name {i}" for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(measure, names)) == {5}
    (path,) = folder.glob("*.json")
    assert sorted(json.loads(path.read_text())) == sorted(names)


def test_a_process_that_measures_meanwhile_wins(folder: Path) -> None:
    assert Choices("avx2", 2).get(NAME, lambda: number(5) + 1) == number(9) == 5


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"rows of a test": -1}', '{"rows of a test": "5"}']
)
def test_a_damaged_file_is_measured_again(folder: Path, text: str) -> None:
    number(5)
    (path,) = folder.glob("*.json")
    path.write_text(text)
    assert number(6) == number(7) == 6


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
    monkeypatch.setattr(choices, "seconds", lambda ways, rows: [[1.0] * len(rows)] * len(ways))
    monkeypatch.setattr(choices, "crossing", lambda rows, first, second: 0)
    choices.of.cache_clear()
    x, half = (torch.randn(rows, 256).to(torch.bfloat16) for rows in (6, 64))
    x, values = x.repeat(1, 2), torch.cat([half, -half], 1)  # the sums are errors of rounding
    weight = bf16.Bf16Weight(values)
    for rows in range(2, dense.LEAST_UNPACKED + 1):
        alone = torch.cat([weight(x[row : row + 1], None) for row in range(rows)])
        assert torch.equal(weight(x[:rows], None), alone), f"{rows} rows"
    assert torch.equal(weight(x, None), linear(x, values)), "the rest is multiplied by torch"
    choices.of.cache_clear()


@pytest.mark.parametrize("name", ["avx512", "amx"])
def test_the_measurements_of_other_levels_run_on_this_one(
    kernels: Library, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A level that has one way only measures it twice: the numbers mean nothing."""
    monkeypatch.setattr(choices, "WEIGHT_BYTES", 1 << 22)
    monkeypatch.setattr(kernels, "level", replace(kernels.level, name=name))
    choices.of.cache_clear()
    way = dense.fastest_way()
    assert way.few in (dense.LEAST_UNPACKED, *dense.MEASURED_ROWS)
    assert way.pairs or name == "avx512"
    wide = quantised.fastest_wide_rows()
    limits = (quantised.LEAST_WIDE_ROWS, *(rows + 1 for rows in quantised.MEASURED_ROWS))
    assert wide in (limits if name == "amx" else (quantised.UNLIMITED,))
    choices.of.cache_clear()
