"""The exchange of ranks over shared memory: its ranks are threads here, which have no interpreter
lock while a kernel waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.waiting import wait_until
from tests.worker.ranks.threads import exchanges
from worker.kernels.library import Library
from worker.ranks.exchange import SLOT, ExchangeBroken, SharedExchange

T = TypeVar("T")
SIZES = (1, 15, 1024, SLOT // 4, 3 * SLOT // 4 + 7)  # more than one piece, of each type


def on_all(group: list[SharedExchange], call: Callable[[int, SharedExchange], T]) -> list[T]:
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(call, range(len(group)), group))


def parts(ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=made).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_added_in_float32_in_the_order_of_the_ranks(
    kernels: Library, ranks: int, dtype: torch.dtype
) -> None:
    group = exchanges(ranks)
    for size in SIZES:
        given = parts(ranks, size, dtype=dtype)
        expected = given[0].float()
        for part in given[1:]:
            expected = expected + part.float()

        def summed(rank: int, exchange: SharedExchange, given: list[Tensor] = given) -> Tensor:
            return exchange.sum(given[rank])

        found = on_all(group, summed)
        assert all(torch.equal(one, expected.to(dtype)) for one in found)


@pytest.mark.parametrize("columns", [1, 37, SLOT // 8, SLOT // 2 + 3])
def test_rank_0_gathers_rows_and_gives_its_own(kernels: Library, columns: int) -> None:
    group = exchanges(3)
    given = parts(3, 5, columns)
    first, *others = on_all(group, lambda rank, exchange: exchange.gather(given[rank]))
    assert torch.equal(first, torch.cat(given, dim=1))
    assert [one is mine for one, mine in zip(others, given[1:], strict=True)] == [True, True]

    wide = parts(3, 5, columns + 2)
    expected = wide[0][:, :columns].clone()
    found = on_all(group, lambda rank, exchange: exchange.first(wide[rank][:, :columns]))
    assert all(torch.equal(one, expected) for one in found)
    fresh = parts(3, 5, columns + 2)
    assert torch.equal(wide[1][:, columns:], fresh[1][:, columns:])  # what is beside the rows


def test_ranks_that_come_late_read_what_was_meant_for_them(kernels: Library) -> None:
    """Slots are used again, and no rank may be two pieces ahead of another."""
    group = exchanges(4)
    calls = 200

    def run(rank: int, exchange: SharedExchange) -> list[float]:
        late, found = random.Random(rank), []
        for number in range(calls):
            if late.random() < 0.05:
                time.sleep(0.002)
            x = torch.full((1, 3), float(10 * number + rank))
            kind = number % 3
            if kind == 0:
                x = exchange.sum(x)
            elif kind == 1:
                x = exchange.first(x)
            else:
                x = exchange.gather(x)
            found.append(float(x.sum()))
        return found

    ranks = on_all(group, run)
    for number in range(calls):
        values = [10.0 * number + rank for rank in range(4)]
        expected = [
            [3 * sum(values)] * 4,
            [3 * values[0]] * 4,
            [3 * sum(values), *[3 * value for value in values[1:]]],
        ][number % 3]
        assert [found[number] for found in ranks] == expected


def test_a_rank_that_waits_names_those_it_waits_for_until_the_group_ends(kernels: Library) -> None:
    group = exchanges(3)
    assert group[0].awaited() == []

    def run(rank: int, exchange: SharedExchange) -> None:
        if rank == 2:
            wait_until(lambda: group[0].awaited() == group[1].awaited() == [2])
            exchange.end()
        with pytest.raises(ExchangeBroken):
            exchange.sum(torch.ones(4))

    on_all(group, run)
    assert group[0].awaited() == []  # it waits no longer
    with pytest.raises(ExchangeBroken):
        group[1].require()


def test_a_rank_that_waits_long_sleeps(kernels: Library) -> None:
    """It leaves the core to others, such as the rank that it waits for."""
    group = exchanges(2)
    threads: list[int] = []

    def run(rank: int, exchange: SharedExchange) -> None:
        if rank == 0:
            threads.append(threading.get_native_id())
        else:
            wait_until(lambda: group[0].awaited() and state(threads[0]) == "S")
        exchange.sum(torch.ones(4))

    on_all(group, run)


def state(thread: int) -> str:
    stat = Path(f"/proc/self/task/{thread}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def test_the_memory_has_no_name(kernels: Library) -> None:
    """So nothing is left of a group whose processes are killed."""
    group = exchanges(2)
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in lines if "chatjobs-ranks" in line]
    assert len(mapped) >= len(group)
    assert {*mapped} == {"/memfd:chatjobs-ranks (deleted)"}
