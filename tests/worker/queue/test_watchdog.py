"""When an engine counts as hanging or dead, and what its worker reports about it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jobs import JobError
from worker.backend import Health, MemoryUse
from worker.queue.watchdog import Watchdog


class Engine:
    """A backend in a given state of health."""

    def __init__(self) -> None:
        self.state = Health(alive=True, progress=1, running=1, waiting=0, tokens_generated=0)

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


def test_a_busy_engine_without_a_step_hangs(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    assert not watchdog.hangs(start)
    assert not watchdog.hangs(start + 9)
    assert watchdog.hangs(start + 11)
    engine.state = replace(engine.state, progress=2)
    assert not watchdog.hangs(start + 12)
    assert not watchdog.hangs(start + 21)


def test_waiting_sequences_count_as_work(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    engine.state = replace(engine.state, running=0, waiting=1)
    assert not watchdog.hangs(start)
    assert watchdog.hangs(start + 11)


def test_an_idle_engine_does_not_hang(engine: Engine, watchdog: Watchdog) -> None:
    start = time.monotonic()
    engine.state = replace(engine.state, running=0)
    assert not watchdog.hangs(start)
    assert not watchdog.hangs(start + 1000)
    engine.state = replace(engine.state, running=1)  # a job arrives: the clock starts now
    assert not watchdog.hangs(start + 1009)
    assert watchdog.hangs(start + 1011)


def test_a_dead_engine_is_an_error(engine: Engine, watchdog: Watchdog) -> None:
    engine.state = replace(engine.state, alive=False, error="out of memory")
    with pytest.raises(JobError, match="engine thread died: out of memory"):
        watchdog.hangs(time.monotonic())


def test_the_report_has_load_and_speed_since_the_last_check(
    engine: Engine, watchdog: Watchdog
) -> None:
    assert set(watchdog.report) == {"started_at"}
    start = time.monotonic()
    watchdog.hangs(start)
    engine.state = replace(engine.state, progress=2, running=3, waiting=4, tokens_generated=50)
    watchdog.hangs(start + 2)
    assert watchdog.report["tokens_per_second"] == 25.0
    engine.state = replace(engine.state, progress=3, tokens_generated=60)
    watchdog.hangs(start + 3)
    assert watchdog.report["tokens_per_second"] == 10.0
    assert (watchdog.report["running"], watchdog.report["waiting"]) == (3, 4)
    assert watchdog.report["tokens"] == 60
    assert watchdog.report["memory"] == {
        "device": "cpu",
        "weights": 1,
        "cache": 2,
        "cache_limit": 3,
        "free": 4,
    }
