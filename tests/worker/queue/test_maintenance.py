"""Jobs that RQ's own tools schedule, requeue, cancel or fail get a worker, a row and their time."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from rq import Queue, SimpleWorker
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import JobError, keys
from jobs.operations import CHAT
from jobs.store.connection.protocol import run_sync
from jobs.store.job_store import JobStore
from jobs.store.requeue import requeue
from jobs.store.rq_layout import job_key
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.queue.test_job_store import claim, ended
from tests.worker.site import PATIENCE, Site, wait_until
from worker import tasks

LIST = f"rq:queue:{QUEUE}"
REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def waiting(site: Site) -> list[str]:
    return [name.decode() for name in site.redis.lrange(LIST, 0, -1)]


def rows_in_outbox(site: Site) -> int:
    return int(site.redis.xlen(keys.outbox("default")))


def enqueue_in(queue: Queue, seconds: float) -> RQJob:
    return queue.enqueue_in(timedelta(seconds=seconds), CHAT.func, request=REQUEST)


def test_a_scheduled_job_is_queued_when_its_time_has_come(
    site: Site, store: JobStore, queue: Queue
) -> None:
    later, now = enqueue_in(queue, 3600), enqueue_in(queue, -1)
    store.claim(lambda *_: 0)
    assert waiting(site) == [now.id]
    assert now.get_status().value == "queued"
    assert later.get_status().value == "scheduled"
    site.burst()
    assert site.client.job(now.id).result(timeout=PATIENCE).text


def test_cancelling_a_scheduled_job_ends_it(site: Site, store: JobStore, queue: Queue) -> None:
    job = enqueue_in(queue, 3600)
    assert site.client.job(job.id).cancel()
    assert site.client.job(job.id).status() == "cancelled"
    assert rows_in_outbox(site) == 1
    assert not site.redis.exists("rq:scheduled:chat:fake")
    assert not site.client.job(job.id).cancel()


def test_a_job_that_rq_has_cancelled_gets_its_row_once(site: Site, store: JobStore) -> None:
    job = site.submit()
    fetch(site, job).cancel()
    assert rows_in_outbox(site) == 0
    store.maintenance.step()
    store.maintenance.step()
    assert rows_in_outbox(site) == 1
    with pytest.raises(JobError, match="cancelled with RQ's own tools"):
        job.result(timeout=PATIENCE)
    assert site.redis.ttl(job_key(job.id)) > 0
    site.burst()
    assert site.row(job)["status"] == "cancelled"


def test_settled_and_cancelled_jobs_get_no_second_row(site: Site, store: JobStore) -> None:
    site.submit_many(["a", "b"])[1].cancel()
    assert store.settle([ended(one) for one in claim(store)]) == [True]
    store.maintenance.step()
    assert rows_in_outbox(site) == 2


def test_a_job_that_a_worker_with_another_serializer_failed_gets_its_row(
    site: Site, store: JobStore
) -> None:
    job = site.submit()
    SimpleWorker([Queue(QUEUE, connection=site.redis)], connection=site.redis).work(burst=True)
    assert job.status() == "failed"
    store.maintenance.step()
    assert rows_in_outbox(site) == 1


def test_a_stock_worker_returns_the_job_with_a_sentence(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "RETURN_SECONDS", 0.0)
    job = site.submit()
    worker = SimpleWorker([queue], connection=site.redis, serializer=JSONSerializer)
    with caplog.at_level("ERROR", logger="rq.worker"):
        worker.work(burst=True, max_jobs=2)
    assert "serve the jobs with chatjobs work --model fake" in caplog.text
    assert job.status() == "queued"
    assert waiting(site) == [job.id]
    site.burst()
    assert job.result(timeout=PATIENCE).text
    site.assert_settled([job])


def test_a_requeued_hash_loses_its_expiry(site: Site, store: JobStore, queue: Queue) -> None:
    job = site.submit()
    assert store.settle([ended(one) for one in claim(store)]) == [True]
    fetch(site, job).requeue()
    limited = queue.enqueue(CHAT.func, request=REQUEST, ttl=1000)
    assert site.redis.ttl(job_key(job.id)) > 0
    store.maintenance.step()
    assert site.redis.ttl(job_key(job.id)) == -1
    assert site.redis.ttl(job_key(limited.id)) > 0  # RQ's own limit on waiting
    (again,) = claim(store)
    assert again.lease.attempt == 2


def test_a_job_that_ends_while_it_is_looked_at_keeps_its_expiry(
    site: Site, store: JobStore
) -> None:
    job = site.submit()
    assert store.settle([ended(one) for one in claim(store)]) == [True]
    site.redis.rpush(LIST, job.id)  # as the list was when it was read
    store.maintenance.step()
    assert site.redis.ttl(job_key(job.id)) > 0


def test_a_ttl_passes_in_the_queue_by_the_clock_of_redis(site: Site, store: JobStore) -> None:
    brief, long = site.submit(ttl=0.05), site.submit(ttl=3600)
    site.redis.hset(job_key(brief.id), "enqueued_at", "2099-01-01T00:00:00.000000Z")

    def has_failed() -> bool:
        store.maintenance.step()
        return brief.status() == "failed"

    wait_until(has_failed)
    with pytest.raises(JobError) as caught:
        brief.result(timeout=PATIENCE)
    assert caught.value.code == "timeout"
    assert rows_in_outbox(site) == 1
    assert long.status() == "queued"
    assert site.redis.zcard(keys.DEADLINES) == 1
    site.redis.hset(job_key(long.id), "enqueued_at", "2001-01-01T00:00:00.000000Z")
    site.burst()
    assert long.result(timeout=PATIENCE).text  # whatever the clock of its producer said
    assert not site.redis.exists(keys.DEADLINES)


def test_the_timeout_of_rq_ends_an_attempt(site: Site, queue: Queue) -> None:
    request = {**REQUEST, "metadata": {"words": "1000000"}}
    job = queue.enqueue(CHAT.func, request=request, job_timeout=1)
    site.burst()
    with pytest.raises(JobError, match=r"RQ's timeout of 1 s \(job_timeout\): enqueue it"):
        site.client.job(job.id).result(timeout=PATIENCE)


def test_dependents_are_queued_even_if_the_reply_is_lost(
    site: Site, store: JobStore, queue: Queue
) -> None:
    parents = [queue.enqueue(CHAT.func, request=REQUEST) for _ in range(2)]
    child = queue.enqueue(CHAT.func, request=REQUEST, depends_on=parents[0])
    both = queue.enqueue(CHAT.func, request=REQUEST, depends_on=parents)
    site.burst()  # its settlements alone: no further call for the dependents
    for job in (*parents, child, both):
        assert site.client.job(job.id).result(timeout=PATIENCE).text
    assert not site.redis.exists("rq:deferred:chat:fake")


@pytest.mark.parametrize("field", ["chatjobs_attempt", "failure_ttl", "chatjobs_error", "timeout"])
def test_a_foreign_value_in_the_hash_stops_nobody(site: Site, store: JobStore, field: str) -> None:
    job, cancelled = site.submit_many(["a", "b"])
    for one in (job, cancelled):
        site.redis.hset(job_key(one.id), field, b"x\xff")
    assert cancelled.cancel()
    site.burst()
    assert job.result(timeout=PATIENCE).text
    assert "".join(chunk.text for chunk in job.stream())
    site.assert_settled([job, cancelled])


@pytest.mark.parametrize("requeue_with", ["chatjobs", "rq"])
def test_a_requeued_job_that_is_cancelled_has_a_row_of_its_own_attempt(
    site: Site, store: JobStore, requeue_with: str
) -> None:
    job = site.submit(run="r")
    assert store.settle([ended(one) for one in claim(store)]) == [True]
    if requeue_with == "rq":
        fetch(site, job).requeue()
    else:
        assert run_sync(requeue(job.id), site.client.connection)
    assert job.cancel()
    entries = [json.loads(row[b"row"]) for _, row in site.redis.xrange(keys.outbox("r"))]
    assert [(one["attempt"], one["status"]) for one in entries] == [(1, "error"), (2, "cancelled")]
    site.burst()
    (row,) = site.rows("r")
    assert (row["status"], row["attempt"]) == ("cancelled", 2)


@pytest.mark.parametrize("attempt", ["x", "1.5", b"\xff", "9" * 40])
def test_a_foreign_attempt_of_a_claimed_job_stops_no_return(
    site: Site, store: JobStore, attempt: str | bytes
) -> None:
    job = site.submit()
    (claimed,) = claim(store)
    site.redis.hset(job_key(job.id), mapping={"chatjobs_attempt": attempt, "chatjobs_bytes": "x"})
    store.leases.give_back([claimed.lease], undo_attempt=True)
    assert waiting(site) == [job.id]
    site.burst()
    assert job.result(timeout=PATIENCE).text
