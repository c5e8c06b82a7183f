"""RQ's `Retry` on our jobs, and the pauses of jobs that a machine could not run."""

from __future__ import annotations

from typing import Any

import pytest
from rq import Queue
from rq.job import Job as RQJob
from rq.job import Retry

from jobs.operations import CHAT
from tests.worker.fake_backend import FakeBackend
from tests.worker.queue.rq_jobs import QUEUE
from tests.worker.site import Site

SCHEDULED = f"rq:scheduled:{QUEUE}"


def enqueue(queue: Queue, retry: Retry, **metadata: str) -> RQJob:
    """A job that RQ's own functions have enqueued, and that fails."""
    request = {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "metadata": {"fail": "context_length_exceeded", **metadata},
    }
    return queue.enqueue(CHAT.func, request=request, retry=retry)


def wait_of(site: Site, job: Any) -> float:
    """Seconds until a scheduled job is queued."""
    seconds, microseconds = site.redis.time()
    return float(site.redis.zscore(SCHEDULED, job.id)) - seconds - microseconds / 1e6


@pytest.mark.parametrize("interval", [100, [100, 200], [100, 200, 300, 400]])
def test_the_intervals_of_rq_are_the_pauses(site: Site, queue: Queue, interval: Any) -> None:
    job = enqueue(queue, Retry(max=3, interval=interval))
    for left in (3, 2, 1):
        job.retries_left = left
        expected = job.get_retry_interval()
        site.burst()
        assert expected - 60 < wait_of(site, job) <= expected
        site.redis.zincrby(SCHEDULED, -expected - 1, job.id)
    site.burst()
    assert job.get_status() == "failed"


def test_without_an_interval_a_job_is_queued_at_once(
    site: Site, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 1000.0)
    monkeypatch.setattr("worker.queue.retry.MAX_RETRY_SECONDS", 1000.0)
    job = enqueue(queue, Retry(max=2))
    site.burst()
    assert job.get_status() == "failed"
    assert site.redis.hget(job.key, "chatjobs_attempt") == b"3"


class OneByOne(FakeBackend):
    """Has room for a job when the one before it has been settled or returned."""

    def __init__(self, site: Site) -> None:
        super().__init__(max_batch=1)
        self._site = site

    def room(self, model: str, *, bulk: bool) -> int:
        started = self._site.redis.exists(f"rq:wip:{QUEUE}")
        return 0 if started else super().room(model, bulk=bulk)


@pytest.mark.parametrize("front", [False, True])
def test_a_retry_goes_to_the_front_if_rq_says_so(site: Site, queue: Queue, front: bool) -> None:
    failing = enqueue(queue, Retry(max=1, enqueue_at_front=front))
    other = site.submit()
    site.burst(OneByOne(site))
    ends = {name: site.redis.hget(f"rq:job:{name}", "ended_at") for name in (failing.id, other.id)}
    assert (ends[failing.id] < ends[other.id]) is front


@pytest.mark.parametrize("intervals", [b"no JSON", b"{}", b"[]", b'["a"]', b"[-1]", b"[1e400]"])
def test_foreign_intervals_do_not_stop_the_worker(
    site: Site, queue: Queue, intervals: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)
    job = enqueue(queue, Retry(max=1))
    site.redis.hset(job.key, "retry_intervals", intervals)
    site.burst()
    assert job.get_status() == "failed"
    assert site.redis.hget(job.key, "chatjobs_attempt") == b"2"


def test_a_job_that_a_machine_could_not_run_waits_longer_each_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 200.0)
    monkeypatch.setattr("worker.queue.retry.MAX_RETRY_SECONDS", 1000.0)
    monkeypatch.setattr("worker.queue.circuit_breaker.BREAKER_PAUSE_SECONDS", (0.01, 0.02))
    job = site.submit(unforkable=1)
    for longest in (200.0, 400.0, 800.0):
        site.burst()
        assert job.status() == "scheduled"
        assert longest / 2 - 60 < wait_of(site, job) <= longest
        site.redis.zincrby(SCHEDULED, -longest - 1, job.id)
