"""When a worker counts as hanging, and the status that it publishes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jobs import JobError
from jobs.operations import OPERATIONS
from worker.backend import Health, MemoryUse
from worker.queue.served import Served
from worker.queue.status_collector import StatusCollector
from worker.queue.watchdog import Watchdog


class Engine:
    """A backend in a given state of health."""

    def __init__(self) -> None:
        self.state = Health(alive=True, progress=1, running=1, waiting=0, tokens_generated=0)

    funcs = OPERATIONS.keys()

    def health(self) -> Health:
        return self.state

    def memory(self) -> MemoryUse:
        return MemoryUse("cpu", weights=1, cache=2, cache_limit=3, free=4)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def watchdog(engine: Engine) -> Watchdog:
    return Watchdog(engine, hang_seconds=10.0)  # type: ignore[arg-type]


def hangs(watchdog: Watchdog, at: float) -> bool:
    """True if the engine hangs; the loop does not."""
    watchdog._touched_at = at
    return watchdog.hang(at) is not None


def test_a_busy_engine_without_a_step_hangs(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    assert not hangs(watchdog, start)
    assert not hangs(watchdog, start + 9)
    assert hangs(watchdog, start + 11)
    engine.state = replace(engine.state, progress=2)
    assert not hangs(watchdog, start + 12)
    assert not hangs(watchdog, start + 21)


def test_waiting_sequences_count_as_work(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    engine.state = replace(engine.state, running=0, waiting=1)
    assert not hangs(watchdog, start)
    assert hangs(watchdog, start + 11)


def test_an_idle_engine_does_not_hang(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    engine.state = replace(engine.state, running=0)
    assert not hangs(watchdog, start)
    assert not hangs(watchdog, start + 1000)
    engine.state = replace(engine.state, running=1)  # a job arrives: the clock starts now
    assert not hangs(watchdog, start + 1009)
    assert hangs(watchdog, start + 1011)


def test_an_engine_that_loads_a_model_does_not_hang(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    engine.state = replace(engine.state, loading=True)
    assert not hangs(watchdog, start)
    assert not hangs(watchdog, start + 1000)
    engine.state = replace(engine.state, loading=False)
    assert not hangs(watchdog, start + 1009)
    assert hangs(watchdog, start + 1011)


def test_a_loop_that_stands_still_hangs(engine: Engine, watchdog: Watchdog) -> None:
    engine.state = replace(engine.state, running=0)
    watchdog.touch()
    assert watchdog.hang(time.monotonic()) is None
    assert "loop made no progress for 10 s" in (watchdog.hang(time.monotonic() + 11) or "")
    watchdog.touch()
    assert watchdog.hang(time.monotonic()) is None


def test_time_in_which_nothing_could_run_does_not_count(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    assert watchdog.hang(start) is None
    watchdog.restart(start + 1000)
    assert watchdog.hang(start + 1009) is None
    assert watchdog.hang(start + 1011) is not None


def test_a_dead_engine_is_an_error(engine: Engine, watchdog: Watchdog) -> None:
    engine.state = replace(engine.state, alive=False, error="out of memory")
    assert not hangs(watchdog, time.monotonic() + 1000)  # its jobs can be returned
    with pytest.raises(JobError, match="engine thread died: out of memory"):
        StatusCollector(engine, Served()).read(time.monotonic())  # type: ignore[arg-type]


def test_the_figures_have_load_and_speed_since_the_last_call(engine: Engine) -> None:
    status = StatusCollector(engine, Served())  # type: ignore[arg-type]
    start = time.monotonic()
    status.read(start)
    engine.state = replace(engine.state, progress=2, running=3, waiting=4, tokens_generated=50)
    assert status.read(start + 2)["tokens_per_second"] == 25.0
    engine.state = replace(engine.state, progress=3, tokens_generated=60)
    report = status.read(start + 3)
    assert report["tokens_per_second"] == 10.0
    assert (report["running"], report["waiting"]) == (3, 4)
    assert report["tokens"] == 60
    assert report["memory"] == {
        "device": "cpu",
        "weights": 1,
        "cache": 2,
        "cache_limit": 3,
        "free": 4,
        "budget": None,
        "caches": {},
        "host_limit": None,
        "kept": {},
    }
