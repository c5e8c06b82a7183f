"""Operators bring models into the memory of a worker and out of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from jobs.errors import JobError
from jobs.store.waiting import Waiting
from tests.worker.residency.test_manager import Worker
from worker.queue.model_state import State
from worker.queue.operator_commands import Facts, Task
from worker.residency.commands import ModelCommands

MOST_ROUNDS = 100


def command(worker: Worker, name: str, model: str = "two") -> Facts:
    """The last answer; the worker's rounds go on meanwhile."""
    task: Task = ModelCommands(worker.residency).handlers[name]({"model": model})
    for _ in range(MOST_ROUNDS):
        try:
            next(task)
        except StopIteration as stop:
            facts: Facts = stop.value
            return facts
        worker.round()
    pytest.fail(f"{name} {model} does not end")


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.backend.close()


def test_a_model_is_loaded_and_unloaded_by_any_of_its_names(worker: Worker) -> None:
    ready = {"model": "two", "state": "ready", "pinned": False}
    assert command(worker, "load", "two-alias") == ready
    assert command(worker, "load", "org/two") == ready and len(worker.backend.loaded) == 1
    assert command(worker, "unload") == ready | {"state": "unloaded"}
    assert command(worker, "unload") == ready | {"state": "unloaded"}
    assert worker.round() == ["cold", "unloaded"]


def test_others_make_room_for_a_model_that_an_operator_loads(worker: Worker) -> None:
    worker.load("one")
    worker.queues = {"one": Waiting(3, 1.0)}
    worker.now += 1
    assert command(worker, "load")["state"] == "ready"
    assert worker.states == ["unloaded", "ready"]


def test_a_model_with_jobs_and_a_pinned_one_are_not_unloaded(worker: Worker) -> None:
    worker.load("two")
    worker.running, worker.queues = {"two": 1}, {"two": Waiting(4, 1.0)}
    with pytest.raises(JobError, match="two has 1 running job and 4 in its queues"):
        command(worker, "unload")
    worker.running, worker.queues = {}, {}
    assert worker.round() == ["cold", "ready"]  # nothing of the command is left
    worker.residency._set_pin("two", pin=True)
    with pytest.raises(JobError, match="two is pinned: unpin it first"):
        command(worker, "unload")


def test_a_worker_that_claims_nothing_loads_and_unloads_for_operators_alone(worker: Worker) -> None:
    worker.paused, worker.queues = True, {"one": Waiting(4, 99.0), "two": Waiting(1, 99.0)}
    assert worker.round() == ["cold", "cold"]
    assert command(worker, "load")["state"] == "ready"
    worker.running = {"two": 1}
    with pytest.raises(JobError, match="drain the worker"):
        command(worker, "unload")
    worker.running = {}
    assert command(worker, "unload")["state"] == "unloaded"  # its queued job is for other workers
    assert worker.round() == ["cold", "unloaded"]
    worker.paused = False
    assert worker.round() == ["ready", "unloaded"]


def test_a_model_is_unloaded_after_its_load_if_an_operator_asks_during_it(worker: Worker) -> None:
    worker.residency.request_load("two")
    worker.residency.step()
    assert worker.residency.state("two") is State.LOADING
    assert command(worker, "unload")["state"] == "unloaded"


def test_an_unload_ends_when_a_later_command_loads_the_model(worker: Worker) -> None:
    worker.load("two")
    task: Task = ModelCommands(worker.residency).handlers["unload"]({"model": "two"})
    next(task)
    assert command(worker, "load")["state"] == "ready"
    with pytest.raises(JobError, match="two stays in memory: a later command loads or pins it"):
        next(task)


def test_a_load_ends_when_a_later_command_unloads_the_model(worker: Worker) -> None:
    task: Task = ModelCommands(worker.residency).handlers["load"]({"model": "two"})
    next(task)
    worker.residency.step()
    assert command(worker, "unload")["state"] == "unloaded"
    with pytest.raises(JobError, match="two is not loaded: a later command unloads it"):
        next(task)


def test_an_unload_that_a_failed_load_has_made_needless_leaves_nothing(worker: Worker) -> None:
    worker.backend.missing = {"org/two"}
    worker.residency.request_load("two")
    worker.residency.step()
    assert command(worker, "unload")["state"] == "cold"
    worker.backend.missing = set()
    worker.now += 100.0
    worker.load("two")
    assert worker.round() == ["cold", "ready"]


def test_pins_leave_room_for_each_other_model(worker: Worker) -> None:
    with pytest.raises(JobError, match=r"two can't be pinned: .* no room for the largest other"):
        command(worker, "pin")
    worker.residency._budget = 240
    assert command(worker, "pin") == {"model": "two", "state": "ready", "pinned": True}
    assert command(worker, "unpin")["pinned"] is False


def test_a_model_that_is_pinned_during_its_unload_comes_back(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.residency._budget = 240
    worker.load("two")
    go, unload = threading.Event(), worker.backend.unload
    monkeypatch.setattr(worker.backend, "unload", lambda *given: (go.wait(), unload(*given)))
    away: Task = ModelCommands(worker.residency).handlers["unload"]({"model": "two"})
    next(away)
    worker.now += 1.0
    worker.residency.step()
    assert worker.states == ["cold", "draining"] and next(away) is None
    pin: Task = ModelCommands(worker.residency).handlers["pin"]({"model": "two"})
    assert next(pin) == {"model": "two", "state": "draining", "pinned": True}
    go.set()
    while worker.states != ["cold", "ready"]:
        worker.round()
    with pytest.raises(JobError, match="two stays in memory: a later command loads or pins it"):
        next(away)
    with pytest.raises(StopIteration) as end:
        next(pin)
    assert end.value.value == {"model": "two", "state": "ready", "pinned": True}
    assert set(worker.backend.resident) == {"two"} and len(worker.backend.loaded) == 2


def test_another_model_makes_room_when_the_one_that_drains_is_pinned() -> None:
    worker = Worker("one", "two", "three")
    worker.residency._budget = worker.backend._budget = 240
    worker.load("one")
    worker.load("two")
    worker.running, worker.queues = {"one": 1, "two": 1}, {"three": Waiting(1, 99.0)}
    assert sorted(worker.round(5.0)) == ["cold", "draining", "ready"]
    draining, ready = sorted(("one", "two"), key=lambda name: worker.residency.state(name).value)
    assert command(worker, "pin", draining) == {"model": draining, "state": "ready", "pinned": True}
    assert worker.residency.state(ready) is State.DRAINING
    worker.backend.close()


def test_a_pin_that_fails_is_undone_and_says_why(worker: Worker) -> None:
    worker.residency._budget = 240
    worker.backend.missing = {"org/two"}
    with pytest.raises(JobError, match="two is not pinned: org/two can't be loaded"):
        command(worker, "pin")
    assert worker.residency.facts("two") == {"model": "two", "state": "cold", "pinned": False}


def test_a_pin_ends_when_a_later_command_unpins_the_model(worker: Worker) -> None:
    worker.residency._budget = 240
    pin: Task = ModelCommands(worker.residency).handlers["pin"]({"model": "two"})
    next(pin)
    assert command(worker, "unpin")["pinned"] is False
    worker.round()
    with pytest.raises(JobError, match="two is not pinned: a later command unpins it"):
        next(pin)


def test_a_load_that_fails_answers_with_its_reason(worker: Worker) -> None:
    worker.backend.missing = {"org/two"}
    with pytest.raises(JobError, match="org/two can't be loaded"):
        command(worker, "load")
    worker.backend.missing = set()
    assert worker.round(100.0) == ["cold", "cold"]  # it was for the command alone
    with pytest.raises(JobError, match="doesn't serve model 'three'; it serves: one, two"):
        command(worker, "load", "three")
    with pytest.raises(JobError, match="started without --memory"):
        next(ModelCommands(None).handlers["load"]({"model": "two"}))
