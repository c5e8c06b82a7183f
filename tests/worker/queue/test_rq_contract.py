"""RQ's own code reads and writes the same keys, fields and counters as the store."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from rq import Queue, SimpleWorker, Worker
from rq.executions import Execution
from rq.job import JobStatus
from rq.registry import (
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
    clean_registries,
)
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.utils import now

from jobs.store.job_store import JobStore
from jobs.store.presence import Presence
from jobs.store.rq_layout import results_key
from tests.worker.fake_backend import FakeBackend
from tests.worker.queue.rq_jobs import fetch
from tests.worker.site import Site


def rq_keys(site: Site, job_id: str, execution: str) -> dict[str, Any]:
    """All keys of RQ with the fields of hashes and the members of sets, ids replaced."""
    found: dict[str, Any] = {}

    def plain(value: bytes) -> str:
        return value.decode().replace(job_id, "JOB").replace(execution, "EXECUTION")

    for key in site.redis.scan_iter("rq:*"):
        kind = site.redis.type(key)
        if kind == b"hash":
            fields = {field.decode() for field in site.redis.hkeys(key)}
            found[plain(key)] = {one for one in fields if not one.startswith("chatjobs_")}
        elif kind == b"zset":
            found[plain(key)] = [plain(member) for member in site.redis.zrange(key, 0, -1)]
        else:
            found[plain(key)] = kind
    return found


# --- the same keys --------------------------------------------------------------------------------


def test_a_claim_writes_what_rq_would_write(site: Site, queue: Queue, store: JobStore) -> None:
    job = site.submit(id="mine")
    (claimed,) = store.claim(lambda *_: 1).jobs
    ours = rq_keys(site, "mine", claimed.lease.execution)

    site.redis.flushall()
    site.submit(id="mine")
    rq_job = fetch(site, job)
    site.redis.lpop(queue.key)
    with site.redis.pipeline() as pipeline:
        execution = Execution.create(rq_job, 60, pipeline=pipeline, worker_name="w1")
        rq_job.prepare_for_execution("w1", pipeline)
        pipeline.execute()
    assert ours == rq_keys(site, "mine", execution.id)


def test_rq_reads_a_claimed_job(site: Site, queue: Queue, store: JobStore) -> None:
    job = site.submit()
    (claimed,) = store.claim(lambda *_: 5).jobs
    rq_job = fetch(site, job)
    assert rq_job.get_status() == JobStatus.STARTED
    assert rq_job.worker_name == "w1"
    assert rq_job.started_at is not None
    (execution,) = rq_job.get_executions()
    assert (execution.id, execution.worker_name) == (claimed.lease.execution, "w1")
    assert queue.count == 0


def test_clean_up_by_rq_keeps_a_claim(site: Site, queue: Queue, store: JobStore) -> None:
    job = site.submit()
    (claimed,) = store.claim(lambda *_: 1).jobs
    registry = StartedJobRegistry(queue=queue)
    registry.cleanup(timestamp=time.time() + 365 * 86_400)
    clean_registries(queue)
    assert registry.get_job_ids() == [job.id]
    assert store.leases.check([claimed.lease]) == [(True, False)]


def test_a_claim_removes_the_ttl_of_the_hash(site: Site, store: JobStore) -> None:
    job = site.submit()
    site.redis.expire(f"rq:job:{job.id}", 5)  # RQ does so for jobs with a ttl
    store.claim(lambda *_: 1)
    assert site.redis.ttl(f"rq:job:{job.id}") == -1


def stock_task() -> str:
    return "done"


def stock_failure() -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("task", "orders"), [(stock_task, {}), (stock_failure, {"fail": "timeout"})]
)
def test_a_settled_job_leaves_what_rq_would_leave(
    site: Site, queue: Queue, task: Any, orders: dict[str, str]
) -> None:
    site.submit(id="mine", **orders)
    site.burst()
    ours = _settled_keys(site)

    site.redis.flushall()
    queue.enqueue(task, job_id="mine")
    SimpleWorker([queue], connection=site.redis, serializer=JSONSerializer).work(burst=True)
    assert ours == _settled_keys(site)


def _settled_keys(site: Site) -> dict[str, Any]:
    """The keys without worker names, locks and fields that only one of the two writes."""
    found = {}
    for key, value in rq_keys(site, "mine", "-").items():
        if key.startswith("rq:worker:"):
            counters = ("successful_job_count", "failed_job_count", "total_working_time")
            found["rq:worker:WORKER"] = value & set(counters)
        elif key == "rq:job:JOB":
            found[key] = value & {"status", "ended_at", "started_at", "last_heartbeat", "origin"}
        elif "lock" not in key:
            found[key] = value
    return found


def test_rq_reads_a_result(site: Site, queue: Queue) -> None:
    job = site.submit("say it")
    site.burst()
    rq_job = fetch(site, job)
    assert rq_job.is_finished
    assert rq_job.ended_at is not None
    assert rq_job.return_value() == job.result(timeout=1).to_dict()
    result = rq_job.latest_result()
    assert result is not None
    assert result.type == Result.Type.SUCCESSFUL
    assert rq_job.get_executions() == []
    assert FinishedJobRegistry(queue=queue).get_job_ids() == [job.id]
    assert 0 < site.redis.ttl(rq_job.key) <= 86_400
    assert 0 < site.redis.ttl(results_key(job.id)) <= 86_400


def test_rq_sees_a_failed_job_with_its_message(site: Site, queue: Queue) -> None:
    job = site.submit(refuse=1)
    site.burst()
    rq_job = fetch(site, job)
    assert rq_job.is_failed
    result = rq_job.latest_result()
    assert result is not None
    assert result.type == Result.Type.FAILED
    assert result.exc_string == "context_length_exceeded: too long, requested by the test"
    assert FailedJobRegistry(queue=queue).get_job_ids() == [job.id]
    assert json.loads(site.hash(job)["chatjobs_error"])["code"] == "context_length_exceeded"


def test_a_failed_job_can_be_queued_again_with_rq(site: Site, queue: Queue) -> None:
    job = site.submit(model="fake", refuse=1)
    site.burst()
    FailedJobRegistry(queue=queue).requeue(job.id)
    assert queue.job_ids == [job.id]
    site.burst()
    assert site.hash(job)["chatjobs_attempt"] == "2"
    assert job.status().value == "failed"


def test_expired_entries_leave_the_registries(site: Site, queue: Queue) -> None:
    site.redis.zadd("rq:finished:chat:fake", {"long-gone": time.time() - 10})
    job = site.submit()
    site.burst()
    assert site.redis.zrange("rq:finished:chat:fake", 0, -1) == [job.id.encode()]


def test_a_result_ttl_of_zero_keeps_nothing(site: Site) -> None:
    job = site.submit()
    site.redis.hset(f"rq:job:{job.id}", "result_ttl", 0)
    site.burst()
    assert not site.redis.exists(f"rq:job:{job.id}", f"rq:results:{job.id}")
    assert site.row(job)["status"] == "ok"


@pytest.mark.parametrize("keep", [None, 0])
def test_a_dependent_job_is_queued(site: Site, queue: Queue, keep: int | None) -> None:
    job = site.submit()
    if keep is not None:
        site.redis.hset(f"rq:job:{job.id}", "result_ttl", keep)
    after = Queue("other", connection=site.redis, serializer=JSONSerializer)
    waiting = after.enqueue(stock_task, depends_on=fetch(site, job))
    assert waiting.get_status() == JobStatus.DEFERRED
    site.burst()
    assert after.job_ids == [waiting.id]


def test_times_in_rq_format_are_read(site: Site, store: JobStore) -> None:
    before = now().timestamp()
    site.submit()
    (claimed,) = store.claim(lambda *_: 1).jobs
    assert before - 1 < claimed.enqueued_at < claimed.claimed_at + 1


def test_jobs_start_in_the_order_of_the_queue(site: Site) -> None:
    jobs = site.submit_many([f"q{i}" for i in range(30)])
    backend = site.burst(FakeBackend(max_batch=4))
    assert backend.begun == [job.id for job in jobs]


def test_a_worker_registers_as_rq_would(site: Site, store: JobStore) -> None:
    ours = Presence(site.redis, store.queues, "ours", 12.0)
    ours.birth()
    rqs = SimpleWorker(store.queues, name="rqs", connection=site.redis)
    rqs.register_birth()  # type: ignore[no-untyped-call]
    for name in ("rq:workers", *(f"rq:workers:{queue}" for queue in store.queues)):
        assert site.redis.smembers(name) == {b"rq:worker:ours", b"rq:worker:rqs"}
    fields, expected = (site.redis.hgetall(f"rq:worker:{name}") for name in ("ours", "rqs"))
    times = (b"birth", b"last_heartbeat")
    assert set(fields) == set(expected)
    assert {name: value for name, value in fields.items() if name not in times} == {
        name: value for name, value in expected.items() if name not in times
    }
    assert 0 < site.redis.ttl("rq:worker:ours") <= 61
    found = {worker.name: worker for worker in Worker.all(connection=site.redis)}
    assert found["ours"].queue_names() == list(store.queues)
