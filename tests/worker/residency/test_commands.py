"""Operators bring models into the memory of a worker and out of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs.errors import JobError
from jobs.store.waiting import Waiting
from tests.worker.residency.test_manager import Worker
from worker.queue.operator_commands import Facts, Task
from worker.residency.commands import ModelCommands
from worker.residency.states import Residence


def command(worker: Worker, name: str, model: str = "two") -> Facts:
    """The last answer; the worker's rounds go on meanwhile."""
    task: Task = ModelCommands(worker.residency).handlers[name]({"model": model})
    while True:
        try:
            next(task)
        except StopIteration as stop:
            facts: Facts = stop.value
            return facts
        worker.round()


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
    assert [one.state.value for one in worker.models] == ["unloaded", "ready"]


def test_a_model_with_jobs_and_a_pinned_one_are_not_unloaded(worker: Worker) -> None:
    worker.load("two")
    worker.running, worker.queues = {"two": 1}, {"two": Waiting(4, 1.0)}
    with pytest.raises(JobError, match="two has 1 running job and 4 in its queues"):
        command(worker, "unload")
    worker.running, worker.queues = {}, {}
    assert worker.round() == ["cold", "ready"]  # nothing of the command is left
    worker.models[1].residence = Residence(pin=True)
    with pytest.raises(JobError, match="two is pinned: unpin it first"):
        command(worker, "unload")


def test_pins_leave_room_for_each_other_model(worker: Worker) -> None:
    with pytest.raises(JobError, match=r"two can't be pinned: .* no room for the largest other"):
        command(worker, "pin")
    worker.residency._budget = 240
    assert command(worker, "pin") == {"model": "two", "state": "ready", "pinned": True}
    assert command(worker, "unpin")["pinned"] is False


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
