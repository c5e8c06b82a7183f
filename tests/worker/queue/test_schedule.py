"""Jobs that wait for their time: `job.delay`, `job.at`, and RQ's own functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from rq import Queue
from rq.registry import ScheduledJobRegistry

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.store.job_store import JobStore
from tests.worker.queue.rq_jobs import QUEUE, fetch
from tests.worker.queue.test_job_store import claim
from tests.worker.site import PATIENCE, Site, wait_until

SCHEDULED = f"rq:scheduled:{QUEUE}"


def let_time_pass(site: Site, job: Job, seconds: float) -> None:
    site.redis.zincrby(SCHEDULED, -seconds, job.id)


def test_a_delayed_job_is_claimed_after_its_delay(site: Site, store: JobStore) -> None:
    job = site.submit(delay=3600)
    assert job.status() == "scheduled"
    seconds, _ = site.redis.time()
    assert 3590 < site.redis.zscore(SCHEDULED, job.id) - seconds < 3602
    assert claim(store, 5) == []
    let_time_pass(site, job, 3605)
    assert [one.lease.job for one in claim(store, 5)] == [job.id]


@pytest.mark.parametrize("text", [False, True])
def test_a_job_waits_for_a_time(site: Site, store: JobStore, text: bool) -> None:
    at = datetime(2100, 1, 1, 12, tzinfo=UTC)
    job = site.submit(at=at.isoformat() if text else at)
    assert site.redis.zscore(SCHEDULED, job.id) == at.timestamp()
    assert job.request.job.at == at == site.client.job(job.id).request.job.at


def test_a_time_that_has_passed_is_now(site: Site) -> None:
    past = datetime.now(UTC) - timedelta(days=1)
    assert site.submit(at=past).status() == "queued"
    assert site.submit(delay=timedelta(0)).status() == "queued"


def test_rq_reads_our_scheduled_jobs(site: Site, queue: Queue) -> None:
    job = site.submit(delay=60)
    registry = ScheduledJobRegistry(queue=queue)  # type: ignore[no-untyped-call]
    assert registry.get_job_ids(cleanup=False) == [job.id]
    assert fetch(site, job).get_status().value == "scheduled"
    assert registry.get_scheduled_time(job.id) > datetime.now(UTC)


def test_cancelling_a_scheduled_job_works(site: Site, store: JobStore) -> None:
    job = site.submit(delay=60, tenant="a", ttl=5)
    assert job.cancel() is True
    assert job.status() == "cancelled"
    assert not site.redis.exists(SCHEDULED) and not site.redis.exists(keys.DEADLINES)
    assert job.cancel() is False
    with pytest.raises(JobError, match="cancelled before it was run"):
        job.result(timeout=PATIENCE)


def test_the_time_to_live_of_a_delayed_job_begins_after_the_delay(site: Site) -> None:
    job = site.submit(delay=100, ttl=50)
    seconds, _ = site.redis.time()
    deadline = int(site.hash(job)["chatjobs_deadline"]) / 1000
    assert 140 < deadline - seconds < 152


def test_a_worker_runs_a_job_when_it_is_due(site: Site) -> None:
    job = site.submit(delay=0.5, tenant="a")
    site.worker()
    wait_until(lambda: job.status() == "finished")


def test_a_scheduled_job_counts_for_the_limit_of_a_model(site: Site) -> None:
    site.redis.hset(keys.LIMITS, "jobs", 1)
    site.submit(delay=60)
    with pytest.raises(
        JobError, match=r"it has 1 job that has not ended, and the limit \(jobs\) is 1;"
    ):
        site.submit()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 1, "at": "2100-01-01T00:00:00Z"}, "delay and at exclude each other"),
        ({"at": "2100-01-01T00:00:00"}, "has no time zone: add one"),
        ({"at": "tomorrow"}, "must be a time such as 2030-01-31T12:00:00Z, got 'tomorrow'"),
        ({"at": 17}, "must be a datetime, or its ISO 8601 text, got 17"),
        ({"delay": -1}, "delay"),
        ({"delay": "1"}, "expected a number, got '1'"),
    ],
)
def test_an_impossible_time_is_refused(site: Site, options: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message) as caught:
        site.submit(**options)
    assert caught.value.code == "invalid_request" and str(caught.value.param).startswith("job")
