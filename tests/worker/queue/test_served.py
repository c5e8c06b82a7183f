"""A model that is added to or removed from the set of a worker is seen by all who ask."""

from __future__ import annotations

import time

import pytest

from jobs import keys
from jobs.api.request import ChatRequest
from jobs.store.job_store import JobStore
from jobs.store.presence import Presence
from jobs.store.workers import Workers, worker_key
from tests.worker.fake_backend import FakeBackend
from tests.worker.site import Site
from worker.model_spec import ModelSpec
from worker.queue.attempt import make_attempt
from worker.queue.served import Served
from worker.queue.stages import Stages
from worker.queue.worker_status import WorkerStatus

QUEUES = [f"{kind}:{name}" for kind in ("chat", "bulk") for name in ("org/one", "one")]
MORE = [f"{kind}:{name}" for kind in ("chat", "bulk") for name in ("org/one", "two", "one")]


def of_queue(site: Site, queue: str) -> set[bytes]:
    """The workers of a queue, as RQ knows them."""
    return site.redis.smembers(f"rq:workers:{queue}")


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
    served.remove("two")
    third = submit(site, "two", "c")
    assert not store.any_waiting() and store.claim(lambda *_: 9).jobs == []
    assert served.provenance["two"]["name"] == "two"  # for jobs that still run
    served.add(two)
    assert [job.lease.job for job in store.claim(lambda *_: 9).jobs] == [third]
    served.remove("one")
    served.remove("two")
    assert store.claim(lambda *_: 9).jobs == [] and not store.any_waiting()
    assert not store.any_unsettled() and store.suspects() == set()
    store.maintenance.step()


def test_presence_status_and_leases_name_the_models_of_the_moment(site: Site) -> None:
    backend = FakeBackend()
    one, two = (backend.load(ModelSpec(reference=name)) for name in ("org/one", "two"))
    served = Served([one])
    store = JobStore(site.redis, served, "w1", worker_key("w1"))
    presence = Presence(site.redis, store.queues, "w1", 12.0)
    workers = Workers(site.url, "w1", store.queues, 5.0)
    status = WorkerStatus(backend, served)
    try:
        presence.birth()
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
        assert of_queue(site, "chat:two") == set()
        presence.report(after, ["a"])
        assert all(of_queue(site, queue) == {b"rq:worker:w1"} for queue in MORE)
        assert site.redis.hget("rq:worker:w1", "current_job") == b"a"
        served.remove("two")
        presence.report(status.read(time.monotonic()), ["a"])
        assert of_queue(site, "chat:two") == of_queue(site, "bulk:two") == set()
        assert all(of_queue(site, queue) == {b"rq:worker:w1"} for queue in QUEUES)
        served.add(two)
        presence.report(status.read(time.monotonic()), [])
        workers.leave()
        assert not any(of_queue(site, queue) for queue in MORE)
    finally:
        workers.close()
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
