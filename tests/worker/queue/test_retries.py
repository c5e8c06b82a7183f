"""Retries after errors that may not happen again: by default, with growing pauses and a record."""

from __future__ import annotations

import json

import pytest

from jobs import JobError
from jobs.store.job_store import JobStore
from jobs.store.rq_layout import FAILURES
from tests.worker.queue.rq_jobs import QUEUE
from tests.worker.queue.test_job_store import claim
from tests.worker.site import PATIENCE, Site
from worker.queue.retry import MAX_RETRY_SECONDS, RETRY_SECONDS, backoff


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.retry.RETRY_SECONDS", 0.01)


@pytest.mark.usefixtures("quick")
def test_an_infrastructure_error_is_retried_by_default(site: Site) -> None:
    job = site.submit(fail="out_of_memory", words=3)
    site.burst()
    with pytest.raises(JobError) as caught:
        job.result(timeout=PATIENCE)
    assert (caught.value.code, caught.value.retryable) == ("out_of_memory", True)
    row = site.row(job)
    assert row["attempt"] == 3
    failures = row["failures"]
    assert [one["attempt"] for one in failures] == [1, 2, 3]
    assert {one["code"] for one in failures} == {"out_of_memory"}
    assert {one["message"] for one in failures} == {"requested by the test"}
    assert all(one["worker"] == row["worker_id"] for one in failures)
    assert sorted(one["at"] for one in failures) == [one["at"] for one in failures]
    assert len(json.loads(site.hash(job)[FAILURES])) == 3


@pytest.mark.usefixtures("quick")
def test_an_error_of_the_request_is_not_retried(site: Site) -> None:
    job = site.submit(fail="context_length_exceeded", retries=5)
    site.burst()
    row = site.row(job)
    assert (row["attempt"], row["error_retryable"]) == (1, False)
    assert [one["code"] for one in row["failures"]] == ["context_length_exceeded"]


def test_retries_can_be_switched_off(site: Site) -> None:
    job = site.submit(fail="internal", retries=0)
    site.burst()
    assert site.row(job)["attempt"] == 1


def test_a_job_waits_for_its_retry_as_scheduled(site: Site, store: JobStore) -> None:
    job = site.submit()
    (claimed,) = claim(store)
    assert store.leases.retry(claimed.lease, 2, 30.0, [])
    assert job.status() == "scheduled"
    seconds, _ = site.redis.time()
    assert 25 < site.redis.zscore(f"rq:scheduled:{QUEUE}", job.id) - seconds < 32
    assert claim(store) == []
    assert job.cancel() and job.status() == "cancelled"


def test_pauses_double_up_to_a_limit() -> None:
    for retried in range(100):
        longest = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2.0**retried)
        assert longest / 2 <= backoff(retried) <= longest
