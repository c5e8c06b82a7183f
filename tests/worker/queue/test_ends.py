"""A job ends alike whoever ends it: a worker, a client, its time to live, or RQ's own tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from rq import Queue
from rq.job import Dependency

from jobs import keys
from jobs.client.job import Job
from jobs.errors import JobError
from jobs.results.failures import failure
from jobs.store.connection.protocol import Commands, run_sync
from jobs.store.job_end import cancel as cancel_steps
from jobs.store.job_end import record_end
from jobs.store.job_state import read_state
from jobs.store.job_store import JobStore
from jobs.store.requeue import requeue
from jobs.store.rq_layout import job_key, results_key
from tests.worker.queue.rq_jobs import fetch
from tests.worker.queue.session_turns import open_session
from tests.worker.queue.test_job_store import claim, ended
from tests.worker.site import PATIENCE, Site


def settle(site: Site, store: JobStore, job: Job) -> None:
    (claimed,) = claim(store)
    assert store.settle([ended(claimed)]) == [True]


def cancel(site: Site, store: JobStore, job: Job) -> None:
    assert job.cancel()


def expire(site: Site, store: JobStore, job: Job) -> None:
    site.redis.zadd(keys.DEADLINES, {job.id: 1})
    store.maintenance.step()


def cancel_with_rq(site: Site, store: JobStore, job: Job) -> None:
    fetch(site, job).cancel()
    store.maintenance.step()


ENDS: dict[str, Callable[[Site, JobStore, Job], None]] = {
    "settled": settle,
    "cancelled": cancel,
    "overdue": expire,
    "cancelled with RQ": cancel_with_rq,
}
each_end = pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
End = Callable[[Site, JobStore, Job], None]


@pytest.mark.parametrize("code", ["cancelled", "internal"])
def test_the_end_of_one_job_hides_none_that_rq_has_cancelled(
    site: Site, store: JobStore, code: str
) -> None:
    site.submit()
    (claimed,) = claim(store)
    other = site.submit()
    fetch(site, other).cancel()
    assert store.settle([ended(claimed, code)]) == [True]
    store.maintenance.step()
    site.burst()
    assert site.row(other)["status"] == "cancelled"


@each_end
def test_the_row_has_the_attempts_that_failed_before(site: Site, store: JobStore, end: End) -> None:
    job = site.submit()
    (claimed,) = claim(store)
    before = failure(1, 0.0, "w0", JobError("out_of_memory", "the first attempt"))
    assert store.leases.retry(claimed.lease, 5, 0.0, [before])
    end(site, store, job)
    site.burst()
    assert "the first attempt" in [one["message"] for one in site.row(job)["failures"]]


def test_an_attempt_that_fails_while_the_job_is_cancelled_is_in_the_row(
    site: Site, store: JobStore
) -> None:
    job = site.submit()
    (claimed,) = claim(store)
    steps: Any = cancel_steps(job.id)
    reply = next(steps)(site.client.connection)  # the job is read: it runs, and none has failed
    error = JobError("out_of_memory", "the first attempt")
    assert store.leases.retry(claimed.lease, 5, 0.0, [failure(1, 0.0, "w0", error)])
    with pytest.raises(StopIteration):
        while True:
            reply = steps.send(reply)(site.client.connection)
    site.burst()
    assert site.row(job)["status"] == "cancelled"
    assert [one["message"] for one in site.row(job)["failures"]] == ["the first attempt"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (
            "chatjobs_failures",
            json.dumps([failure(1, 0.0, "w0", JobError("timeout", "of another attempt"))]),
        ),
        ("chatjobs_attempt", "1"),
    ],
)
def test_a_row_of_an_older_state_is_not_recorded(site: Site, field: str, value: str) -> None:
    job, commands = site.submit(), Commands(site.redis)
    fetch(site, job).cancel()
    before = commands.run_steps(read_state(job.id, full=True))
    site.redis.hset(job_key(job.id), field, value)
    error = JobError("cancelled", "with RQ's tools")
    assert not commands.run_steps(record_end(before, error, "canceled", None))
    assert not site.redis.exists(keys.outbox("default"))
    now = commands.run_steps(read_state(job.id, full=True))
    assert commands.run_steps(record_end(now, error, "canceled", None))
    assert site.redis.xlen(keys.outbox("default")) == 1


@each_end
def test_an_ended_job_leaves_no_key_that_stays(
    site: Site, store: JobStore, queue: Queue, end: End
) -> None:
    job = site.submit()
    queue.enqueue("f", depends_on=Dependency(fetch(site, job), allow_failure=True)).cancel()
    site.redis.sadd(f"{job_key(job.id)}:dependents", "gone")
    end(site, store, job)
    own = [name for name in site.redis.scan_iter(f"*{job.id}*") if site.redis.ttl(name) == -1]
    assert own == []


@each_end
def test_an_ended_job_is_kept_as_failure_ttl_says(site: Site, store: JobStore, end: End) -> None:
    job = site.submit()
    site.redis.hset(job_key(job.id), "failure_ttl", -1)  # RQ's "for ever"
    end(site, store, job)
    assert job.status().over
    assert site.redis.ttl(job_key(job.id)) == -1


@each_end
def test_a_job_with_the_failure_ttl_0_is_deleted_at_once(
    site: Site, store: JobStore, end: End
) -> None:
    job = site.submit()
    site.redis.hset(job_key(job.id), "failure_ttl", 0)
    end(site, store, job)
    assert job.status() == "unknown"
    assert list(site.redis.scan_iter(f"rq:*{job.id}*")) == []
    site.burst()
    assert site.row(job)["job_id"] == job.id


@each_end
def test_an_ended_job_says_since_when(site: Site, store: JobStore, end: End) -> None:
    job = site.submit()
    end(site, store, job)
    assert site.hash(job)["ended_at"]


@pytest.mark.parametrize("end", [settle, cancel, expire])
def test_the_results_of_a_job_that_is_requeued_again_and_again_are_limited(
    site: Site, store: JobStore, end: End
) -> None:
    job = site.submit()
    for _ in range(12):
        end(site, store, job)
        assert run_sync(requeue(job.id), site.client.connection)
    assert site.redis.xlen(results_key(job.id)) == 10  # as RQ keeps them


@each_end
def test_a_bulk_job_has_no_log_of_tokens(site: Site, store: JobStore, end: End) -> None:
    (job,) = site.submit_many(["x"], priority="bulk")
    end(site, store, job)
    assert job.status().over
    assert not site.redis.exists(keys.log(job.id))


@each_end
def test_the_next_turn_follows_a_job_that_nobody_can_read(
    site: Site, store: JobStore, end: End
) -> None:
    session = open_session(site, "s")
    first, second = session.submit("one"), session.submit("two", wait=True)
    site.redis.hset(job_key(first.id), "data", b"foreign")
    end(site, store, first)
    assert first.status().over
    assert second.status() == "queued"
    site.burst()
    assert second.result(timeout=PATIENCE).text
