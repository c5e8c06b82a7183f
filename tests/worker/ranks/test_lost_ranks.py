"""A rank that dies, stops or fails ends its group; the processes are really killed."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import JobError
from tests.waiting import PATIENCE, has_ended, wait_until
from tests.worker.checkpoints import make_checkpoint
from tests.worker.ranks.engines import GREEDY, PROMPTS, followers, in_background, load
from worker import Engine
from worker.layers.batch import Span
from worker.ranks.leader import Ranks, RanksLost
from worker.ranks.messages import Compute


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_killed_or_stopped_ends_the_step_and_the_group(
    number: signal.Signals, tmp_path: Path, start: Callable[..., Engine]
) -> None:
    engine = start(4, make_checkpoint(tmp_path, "qwen3"))
    pids = followers(engine)
    thread, errors = in_background(engine)
    os.kill(pids[1], number)
    thread.join(PATIENCE)
    (error,) = errors
    assert isinstance(error, RanksLost)
    if number is signal.SIGKILL:
        assert "was killed by SIGKILL" in error.message
        assert f"rank 2 (process {pids[1]})" in error.message
    else:
        assert f"rank 2 (process {pids[1]}) was stopped for 5 s" in error.message
    assert all(map(has_ended, pids))
    with pytest.raises(RanksLost):
        engine.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize(
    ("number", "fact"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "was stopped for 5 s")],
)
def test_a_follower_that_is_killed_or_stopped_ends_the_load(
    number: signal.Signals, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    begin = Ranks.begin

    def beginning(ranks: Ranks, slots: int) -> int:
        pids.extend(ranks.pids)
        os.kill(pids[0], number)
        return begin(ranks, slots)

    monkeypatch.setattr(Ranks, "begin", beginning)
    with pytest.raises(RanksLost, match=rf"rank 1 \(process \d+\) {fact}"):
        load("demo", 2)
    assert pids and all(map(has_ended, pids))


def test_a_follower_without_memory_for_its_cache_fails_requests_and_the_group_goes_on(
    start: Callable[..., Engine],
) -> None:
    engine = start(2)
    (pid,) = followers(engine)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), before[1]))
    with pytest.raises(JobError) as caught:
        engine.generate([[*range(5, 400)]] * 16, GREEDY)
    assert caught.value.code == "out_of_memory"
    resource.prlimit(pid, resource.RLIMIT_AS, before)
    assert len(engine.generate([[*range(5, 400)]] * 16, GREEDY)) == 16


def test_the_death_of_a_follower_is_noticed_without_work(start: Callable[..., Engine]) -> None:
    engine = start(2)
    os.kill(followers(engine)[0], signal.SIGKILL)
    wait_until(lambda: engine._core.runner.ranks._watch.lost)
    with pytest.raises(RanksLost, match="SIGKILL"):
        engine._core.step()


def test_work_of_the_ranks_in_which_one_ends_has_no_result(start: Callable[..., Engine]) -> None:
    """Recorded calls go on after the end of the group, and say nothing."""
    engine = start(2)
    ranks = engine._core.runner.ranks
    assert ranks is not None
    with pytest.raises(RanksLost, match="SIGKILL"), ranks.together():
        os.kill(ranks.pids[0], signal.SIGKILL)
        wait_until(ranks._watch.ended.is_set)


def test_a_follower_that_fails_says_why(start: Callable[..., Engine]) -> None:
    engine = start(2)
    ranks = engine._core.runner.ranks
    assert ranks is not None
    ranks.send(Compute((Span(0, 0, [10**6], 1),)))  # no token of the model
    with pytest.raises(RanksLost, match="IndexError: token 1000000 is beyond"):
        engine.generate(PROMPTS, GREEDY)
    assert all(map(has_ended, ranks.pids))


def test_an_error_of_the_leader_in_a_step_ends_the_group(
    start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The followers are in the middle of a step then, and can't be brought back."""
    engine = start(2)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory here")

    monkeypatch.setattr(type(engine._core.runner.model), "_hidden", fail)
    with pytest.raises(RanksLost, match="no memory here"):
        engine.generate(PROMPTS, GREEDY)
    assert all(map(has_ended, followers(engine)))
