"""Ranks that exchange as those on GPUs do: torch.distributed's collectives, here over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.waiting import PATIENCE, has_ended, wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.ranks.engines import GREEDY, PROMPTS, followers, in_background, load
from tests.worker.ranks.gloo import use_gloo
from tests.worker.ranks.threads import exchanges
from worker import Engine
from worker import device as devices
from worker.kernels import library
from worker.ranks import collectives, leader
from worker.ranks.collectives import Collectives
from worker.ranks.exchange import ExchangeBroken, RankExchange, new_memory
from worker.ranks.leader import RanksLost
from worker.ranks.watch import Watch

RANKS, ACTIVE = 3, library.active
WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.fixture(autouse=True)
def gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gloo(monkeypatch)


def on_all(group: list[RankExchange], run: Callable[[int, RankExchange], Tensor]) -> list[Tensor]:
    with ThreadPoolExecutor(len(group)) as pool:
        return [*pool.map(run, range(len(group)), group)]


def of_rank(rank: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))


def test_collectives_are_those_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "active", ACTIVE)
    calls: list[Callable[[int, RankExchange], Tensor]] = [
        lambda rank, group: group.sum(of_rank(rank)),
        lambda rank, group: group.sum(of_rank(rank).T),
        lambda rank, group: group.first(of_rank(rank)[:, 2:5]),
        lambda rank, group: group.first(torch.tensor([[rank + 1], [7]])),
        lambda rank, group: group.gather(of_rank(rank)),
    ]
    with new_memory(Collectives.memory_bytes(RANKS)) as memory:
        group = [Collectives(memory, rank, RANKS) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        [*pool.map(Collectives.connect, group, [torch.device("cpu")] * RANKS)]
    shared = exchanges(RANKS)
    for call in calls:
        for found, expected in zip(on_all([*group], call), on_all([*shared], call), strict=True):
            torch.testing.assert_close(found, expected)
    for one in group:
        one.end()


@pytest.mark.parametrize(
    ("family", "ranks"), [("qwen3", 2), ("llama", 4), ("mixtral", 2), ("qwen3_next", 2)]
)
@pytest.mark.parametrize("overlaps", [False, True])
def test_greedy_tokens_are_those_of_one_rank(
    family: str,
    ranks: int,
    overlaps: bool,
    tmp_path: Path,
    start: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of steps that are launched before the last one is read, as on GPUs."""
    folder = make_checkpoint(tmp_path, family)
    whole = load(folder, 1).generate(PROMPTS, GREEDY)
    monkeypatch.setattr(devices, "CPU_LIMITS", replace(devices.CPU_LIMITS, overlaps=overlaps))
    engine = start(ranks, folder)
    assert engine._core._pipeline.overlaps is (overlaps and family != "qwen3_next")
    split = engine.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in split] == [one.token_ids for one in whole]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_killed_or_stopped_ends_the_step_and_the_group(
    number: signal.Signals, start: Callable[..., Engine]
) -> None:
    engine = start(2)
    pids = followers(engine)
    thread, errors = in_background(engine)
    os.kill(pids[0], number)
    thread.join(PATIENCE)
    (error,) = errors
    assert isinstance(error, RanksLost)
    assert f"rank 1 (process {pids[0]})" in error.message
    assert all(map(has_ended, pids))


def test_a_step_that_is_read_after_the_death_of_a_rank_has_no_result(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for a rank on a GPU is made to return when it is gone, with any values."""
    engine = start(2)
    core = engine._core
    ranks = core.runner.ranks
    assert ranks is not None
    read = core.runner._drawn

    def drawn(*given: object) -> object:
        result = read(*given)  # type: ignore[arg-type]
        os.kill(ranks.pids[0], signal.SIGKILL)
        wait_until(ranks._watch.ended.is_set)
        return result

    monkeypatch.setattr(core.runner, "_drawn", drawn)
    with pytest.raises(RanksLost, match="SIGKILL"):
        engine.generate([PROMPTS[0]], GREEDY)
    assert core.tokens_generated == 0


@pytest.mark.parametrize("given", [None, "0"])
def test_groups_are_made_without_a_watchdog(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WAIT, raising=False)
    if given is not None:
        monkeypatch.setenv(WAIT, given)
    with collectives._without_watchdog():
        assert os.environ[WAIT] == "1"
    assert os.environ.get(WAIT) == given


def test_a_rank_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CONNECT_SECONDS", 0.5)
    with new_memory(0) as memory:
        alone = Collectives(memory, 0, 2)
    with pytest.raises(ExchangeBroken, match=r"did not connect within|timed out|timeout"):
        alone.connect(torch.device("cpu"))


def test_a_group_that_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "CONNECT_SECONDS", 60.0)
    with new_memory(0) as memory:
        alone = Collectives(memory, 0, 2)
    alone.end()
    with pytest.raises(ExchangeBroken, match="has ended"):
        alone.connect(torch.device("cpu"))
    with pytest.raises(ExchangeBroken, match="has ended"):
        alone.sum(torch.ones(1))


def test_an_idle_follower_that_is_stopped_ends_a_group_on_gpus(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader may wait for it in any call that reaches its own GPU."""
    monkeypatch.setattr(
        leader, "Watch", lambda *given, **options: Watch(*given, **{**options, "on_gpus": True})
    )
    engine = start(2)
    ranks = engine._core.runner.ranks
    assert ranks is not None
    os.kill(ranks.pids[0], signal.SIGSTOP)
    wait_until(lambda: ranks._watch.lost)
    assert ranks._watch.lost == f"rank 1 (process {ranks.pids[0]}) was stopped for 5 s"
