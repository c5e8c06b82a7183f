"""A model that is added to the set of a worker, or changes its state, is seen by all who ask."""

from __future__ import annotations

import time

import pytest

from jobs import keys
from jobs.api.request import ChatRequest
from jobs.errors import JobError
from jobs.store.job_store import JobStore
from jobs.store.workers import worker_key
from tests.worker.fake_backend import FakeBackend
from tests.worker.site import Site
from worker.model_spec import ModelSpec
from worker.queue.attempt import make_attempt
from worker.queue.capacity import Capacity
from worker.queue.model_state import State
from worker.queue.served import Served
from worker.queue.stages import Stages
from worker.queue.status_collector import StatusCollector

MORE = [f"{kind}:{name}" for kind in ("chat", "bulk") for name in ("org/one", "two", "one")]


def submit(site: Site, model: str, text: str) -> str:
    request = ChatRequest(model=model, messages=[{"role": "user", "content": text}])
    return site.client.submit(request).id


def test_the_store_claims_for_the_models_of_the_moment(site: Site) -> None:
    backend = FakeBackend()
    try:
        one, two = (backend.load(ModelSpec(reference=name)) for name in ("org/one", "two"))
    finally:
        backend.close()
    served = Served([one])
    store = JobStore(site.redis, served, "w1", worker_key("w1"))
    first, second = submit(site, "one", "a"), submit(site, "two", "b")
    assert [job.lease.job for job in store.claim(lambda *_: 9).jobs] == [first]
    assert not store.any_waiting()
    served.add(two)
    assert store.any_waiting()
    (claimed,) = store.claim(lambda *_: 9).jobs
    assert claimed.lease.job == second
    assert store.model_of(claimed.lease) == ("two", False)
    assert make_attempt(claimed, served).request.model == "two"


def test_a_store_without_models_claims_nothing(site: Site) -> None:
    submit(site, "one", "a")
    store = JobStore(site.redis, Served(), "w1", worker_key("w1"))
    assert store.claim(lambda *_: 9).jobs == [] and not store.any_waiting()
    assert not store.any_unsettled() and store.suspects() == set()
    store.maintenance.step()


def test_jobs_are_claimed_for_a_model_only_while_it_is_ready() -> None:
    backend = FakeBackend()
    model = backend.load(ModelSpec(reference="org/one"))
    served, names = Served(), {"org/one": "one", "one": "one"}
    served.register("one", ["org/one"])

    def room() -> int:
        return Capacity(backend, served, single=False).of("org/one", bulk=False)

    assert served.states == {"one": State.COLD} and served.open_names == {} and room() == 0
    served.refuse("one", JobError("out_of_memory", "requested by the test"))
    assert served.refusal("org/one") is not None
    served.enter("one", State.LOADING)
    assert served.refusal("org/one") is None and not served.is_open("org/one")
    served.add(model)
    assert served.open_names == names and served.open_models == [model] and room() == 8
    for state in (State.DRAINING, State.UNLOADED):
        served.enter("one", state)
        assert served.open_names == {} and served.open_models == [] and room() == 0
    assert dict(served) == names and served.provenance["org/one"]["name"] == "one"
    backend.close()


def test_status_and_locks_name_the_models_of_the_moment(site: Site) -> None:
    backend = FakeBackend()
    one, two = (backend.load(ModelSpec(reference=name)) for name in ("org/one", "two"))
    served = Served([one])
    store = JobStore(site.redis, served, "w1", worker_key("w1"))
    status = StatusCollector(backend, served)
    try:
        before = status.read(time.monotonic())
        assert (before["models"], before["names"]) == (["one"], ["one", "org/one"])
        assert list(before["room"]) == [
            keys.queue(name, kind)
            for name in ("org/one", "one")
            for kind in ("interactive", "bulk")
        ]
        lock = keys.upkeep(store.queues)
        served.add(two)
        after = status.read(time.monotonic())
        assert (after["models"], after["names"]) == (["one", "two"], ["one", "org/one", "two"])
        assert set(after["room"]) == set(MORE)
        moved = {f"{queue} worker.tasks.score" for queue in MORE}
        assert set(store.queues) == set(MORE) | moved
        assert keys.upkeep(store.queues) != lock
    finally:
        backend.close()


def test_a_fault_is_looked_for_in_the_queues_of_the_moment(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend()
    try:
        one, two = (backend.load(ModelSpec(reference=name)) for name in ("org/one", "two"))
    finally:
        backend.close()
    served = Served([one])
    store = JobStore(site.redis, served, "w1", worker_key("w1"))
    stages = Stages(site.redis, store.queues)
    served.add(two)
    site.redis.set("rq:queue:chat:two", "foreign")
    assert not stages.run("claiming jobs", lambda: store.claim(lambda *_: 1))
    assert "rq:queue:chat:two" in caplog.text
