"""The states of a worker's models, by a manager whose clock, queues and neighbours are fake."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from jobs.errors import JobError
from jobs.store.waiting import Waiting
from tests.waiting import wait_until
from tests.worker.fake_backend import FakeBackend
from worker.model_spec import ModelSpec
from worker.queue.served import Served
from worker.queue.status_collector import StatusCollector
from worker.residency.budget import Share
from worker.residency.executor import LEASE_RENEWAL_SECONDS
from worker.residency.manager import Residency
from worker.residency.model import Model, first_models
from worker.residency.policy import ResidencyPolicy
from worker.residency.swap import Swap

BUDGET = 150


class Worker:
    """A worker with a budget for one of two models, or of others."""

    def __init__(self, *names: str, **policies: ResidencyPolicy) -> None:
        self.backend, self.served, self.now = FakeBackend(budget=BUDGET), Served(), 1000.0
        self.queues: dict[str, Waiting] = {}
        self.running: dict[str, int] = {}
        self.used_at: dict[str, float] = {}
        self.leases: dict[str, str] = {}  # of other workers, or "mine", by model
        self.ready_there: set[str] = set()
        self.able_there: set[str] | None = set()
        self.opened, self.paused = 0, False
        models = [
            Model(
                name,
                ModelSpec(reference=f"org/{name}", aliases=(f"{name}-alias",)),
                Share(90, 10, 20, 10),
                policies.get(name, ResidencyPolicy()),
            )
            for name in names or ("one", "two")
        ]
        for model in models:
            self.served.register(model.name, model.names)
        self.models = models
        self.residency = Residency(
            self.backend,
            self.served,
            models,
            BUDGET,
            lambda names: {name: self.queues[name] for name in names if name in self.queues},
            self,
            self,
            max_wait=30.0,
            paused=lambda: self.paused,
            on_ready=self._on_ready,
            clock=lambda: self.now,
        )

    def _on_ready(self) -> None:
        self.opened += 1

    # --- the other workers ------------------------------------------------------------------------

    def ready(self) -> set[str]:
        return self.ready_there

    def able(self) -> set[str] | None:
        return self.able_there

    def lease(self, model: str) -> bool:
        return self.leases.setdefault(model, "mine") == "mine"

    def release(self, model: str) -> None:
        assert self.leases.pop(model) == "mine"

    @property
    def states(self) -> list[str]:
        return [self.served.state(one.name).value for one in self.models]

    # --- rounds -----------------------------------------------------------------------------------

    def round(self, seconds: float = 1.0) -> list[str]:
        """A round after so many seconds, up to the end of a swap. Returns the states."""
        self.now += seconds
        self.residency.step()
        swap = self.residency._executor._swap
        if swap is not None:
            wait_until(lambda: self._takes_end_of(swap))
        return self.states

    def _takes_end_of(self, swap: Swap) -> bool:
        self.residency.step()
        return self.residency._executor._swap is not swap

    def load(self, name: str) -> None:
        self.queues = {name: Waiting(1, 0.0)}
        states = dict(zip([one.name for one in self.models], self.round(), strict=True))
        assert states[name] == "ready"
        self.queues = {}


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.backend.close()


def test_a_model_is_loaded_for_the_first_job_under_any_of_its_names(worker: Worker) -> None:
    assert worker.round() == ["cold", "cold"] and worker.served.open_names == {}
    worker.queues = {"two-alias": Waiting(1, 0.0)}
    assert worker.round() == ["cold", "ready"]
    assert worker.served.open_names == dict.fromkeys(("org/two", "two-alias", "two"), "two")
    assert worker.backend.resident == {"two": 120} and worker.opened == 1


def test_a_swap_unloads_first_and_drains_what_runs(worker: Worker) -> None:
    worker.load("one")
    worker.running = {"one": 1}
    worker.queues = {"one": Waiting(5, 9.0), "two": Waiting(1, 29.0)}
    assert worker.round() == ["ready", "cold"]
    worker.queues["two"] = Waiting(1, 30.0)
    assert worker.round() == ["draining", "cold"]
    assert worker.served.open_names == {} and set(worker.backend.resident) == {"one"}
    assert worker.round(0.01) == ["draining", "cold"]  # a job of it still runs
    worker.running = {}
    assert worker.round(0.01) == ["unloaded", "ready"]  # without a wait for the next plan
    assert worker.backend.peak_bytes <= BUDGET


def test_a_model_that_drains_is_ready_again_when_the_other_jobs_are_gone(worker: Worker) -> None:
    worker.load("one")
    worker.running = {"one": 1}
    worker.queues = {"two": Waiting(1, 99.0)}
    assert worker.round(5.0) == ["draining", "cold"]
    worker.queues = {}
    assert worker.round() == ["ready", "cold"]
    assert set(worker.served.open_names.values()) == {"one"} and worker.leases == {}


def test_a_model_is_unloaded_after_its_keep_alive() -> None:
    worker = Worker(one=ResidencyPolicy(keep_alive=5.0))
    worker.load("one")
    worker.running = {"one": 1}
    assert worker.round(100.0) == ["ready", "cold"]
    worker.running, worker.used_at = {}, {"one": worker.now}
    assert worker.round(4.0) == ["ready", "cold"]
    assert worker.round(1.0) == ["unloaded", "cold"]
    assert worker.backend.resident == {}
    worker.backend.close()


def test_one_worker_at_a_time_brings_a_model_in(worker: Worker) -> None:
    worker.leases["two"] = "other"
    worker.queues = {"two": Waiting(1, 3.0)}
    assert worker.round() == ["cold", "cold"] and worker.backend.loaded == []
    worker.leases.clear()
    assert worker.round() == ["cold", "ready"] and worker.leases == {"two": "mine"}
    worker.queues = {}
    worker.round()
    assert worker.leases == {}  # it claims: others may load the model as well


def test_the_lease_is_renewed_while_a_load_lasts(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    load = worker.backend.load
    monkeypatch.setattr(worker.backend, "load", lambda spec: (go.wait(), load(spec))[1])
    worker.queues = {"two": Waiting(1, 0.0)}
    worker.now += 1
    worker.residency.step()
    assert worker.states == ["cold", "loading"]
    worker.leases.clear()  # it has expired
    worker.now += LEASE_RENEWAL_SECONDS
    worker.residency.step()
    assert worker.leases == {"two": "mine"}
    go.set()
    assert worker.round() == ["cold", "ready"]


def test_the_load_path_is_blocked_only_while_this_worker_brings_a_model_in(worker: Worker) -> None:
    def blocked() -> float:
        return worker.residency.figures().blocked_seconds

    worker.load("one")
    worker.running = {"one": 1}
    worker.queues, worker.leases["two"] = {"two": Waiting(1, 99.0)}, "other"
    for _ in range(5):
        assert worker.round() == ["ready", "cold"]
        worker.now += 0.25
        assert blocked() == 0.0  # another worker brings it in
    worker.leases.clear()
    while worker.round() != ["draining", "cold"]:
        assert blocked() == 0.0
    since = worker.now
    assert worker.round(4.0) == ["draining", "cold"] and blocked() == worker.now - since == 4.0
    worker.leases["two"] = "other"  # its lease has expired
    worker.round()
    assert blocked() == 0.0
    worker.queues, worker.running, worker.leases = {}, {}, {}
    worker.round()
    worker.load("two")
    assert blocked() == 0.0


def test_the_load_path_is_blocked_for_each_model_from_its_own_lease_on() -> None:
    worker = Worker("one", "two", "three")
    worker.load("one")
    worker.running, worker.queues = {"one": 1}, {"two": Waiting(1, 99.0)}
    assert worker.round() == ["draining", "cold", "cold"]
    worker.queues = {"three": Waiting(1, 99.0)}
    assert worker.round(5.0) == ["draining", "cold", "cold"]
    assert worker.leases == {"three": "mine"}
    assert worker.residency.figures().blocked_seconds == 0.0
    worker.backend.close()


def loads_fail(worker: Worker, times: int) -> list[float]:
    """Let loads fail; returns the pauses before them."""
    worker.backend.missing = {"org/two"}
    pauses = []
    for _ in range(times):
        before, tried = worker.now, len(worker.backend.loaded)
        while len(worker.backend.loaded) == tried:
            worker.round()
        pauses.append(worker.now - before)
    return pauses


def test_jobs_of_a_model_that_can_not_be_loaded_fail_after_three_loads(worker: Worker) -> None:
    worker.queues = {"two": Waiting(1, 0.0)}
    assert loads_fail(worker, 2) == [1.0, 1.0]
    assert worker.served.refusal("two-alias") is None
    loads_fail(worker, 1)
    refusal = worker.served.refusal("two-alias")
    assert refusal is not None and "can't be loaded" in refusal.message
    status = StatusCollector(worker.backend, worker.served, residency=worker.residency.status)
    assert status.read(worker.now)["failing"] == ["org/two", "two", "two-alias"]
    worker.backend.missing = set()  # the file is there again
    assert worker.round(60.0) == ["cold", "ready"]
    assert worker.served.refusal("two") is None
    assert status.read(worker.now)["failing"] == []


def test_jobs_wait_for_other_workers_that_may_load_their_model(worker: Worker) -> None:
    worker.able_there = {"two"}
    worker.queues = {"two": Waiting(1, 0.0)}
    pauses = loads_fail(worker, 9)
    assert worker.served.refusal("two") is None
    assert pauses == sorted(pauses) and pauses[-1] == 60.0
    worker.able_there = None  # the other one does not say now what it serves
    loads_fail(worker, 1)
    assert worker.served.refusal("two") is None
    worker.able_there = set()  # the other one is gone, or has failed as well
    loads_fail(worker, 1)
    assert worker.served.refusal("two") is not None


def test_models_stay_if_the_one_they_make_room_for_can_not_be_downloaded(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(spec: ModelSpec) -> None:
        raise JobError("model_not_found", f"{spec.reference} is gated")

    worker.load("one")
    monkeypatch.setattr(worker.backend, "fetch", fetch)
    worker.queues = {"two": Waiting(1, 0.0)}
    worker.round()
    assert worker.round() == ["ready", "cold"]
    assert set(worker.served.open_names.values()) == {"one"} and "one" in worker.backend.resident


def test_an_unload_that_fails_ends_the_worker(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.load("one")

    def fail(name: str, coming: ModelSpec | None) -> None:
        raise RuntimeError("requested by the test")

    monkeypatch.setattr(worker.backend, "unload", fail)
    worker.queues = {"two": Waiting(1, 0.0)}
    with pytest.raises(JobError, match="requested by the test"):
        worker.round()


def test_nothing_is_loaded_once_the_worker_stops(worker: Worker) -> None:
    worker.residency.stop()
    worker.queues = {"two": Waiting(1, 0.0)}
    assert worker.round() == ["cold", "cold"]


@pytest.mark.parametrize(
    ("policies", "budget", "first"),
    [
        ({}, 240, ["org/one", "org/two"]),
        ({}, 150, ["org/one"]),
        ({"two": ResidencyPolicy(pin=True)}, 150, ["org/two"]),
        ({"one": ResidencyPolicy(preload=False)}, 240, ["org/two"]),
    ],
)
def test_what_is_loaded_at_the_start(
    policies: dict[str, Any], budget: int, first: Sequence[str]
) -> None:
    worker = Worker(**policies)
    assert [one.spec.reference for one in first_models(worker.models, budget)] == first
    worker.backend.close()
