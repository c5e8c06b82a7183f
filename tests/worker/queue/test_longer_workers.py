"""Workers with different contexts serve one queue: a job that is too long for one is run by another
one with a longer context, and fails only without one."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import JobError, keys
from jobs.client.job import Job
from jobs.operations import CHAT
from jobs.store.worker_status import read_statuses, read_workers
from tests.worker.site import PATIENCE, Site, WorkerProcess, wait_until

SHORT, LONG = 64, 512
LONG_PROMPT = "word " * 100


def start(site: Site, context: int, **options: Any) -> WorkerProcess:
    return site.worker(context=context, **options)


def wait_for_contexts(site: Site, *contexts: int) -> dict[int, str]:
    """Until the workers publish these contexts of the model. Returns their names."""

    def found() -> dict[int, str]:
        of_workers = read_statuses(site.redis).contexts("fake", CHAT.func)
        return {tokens: name for name, tokens in of_workers.items()}

    wait_until(lambda: set(found()) == set(contexts))
    return found()


def submit_long(site: Site, **fields: Any) -> Job:
    return site.submit(LONG_PROMPT, **fields)


def assert_too_long(job: Job, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence) as caught:
        job.result(timeout=PATIENCE)
    assert caught.value.code == "context_length_exceeded"


def left(job: Job, site: Site) -> bool:
    """True if a worker has returned a job for one with a longer context."""
    return "chatjobs_longer" in site.hash(job)


@pytest.mark.parametrize("priority", ["interactive", "bulk"])
def test_long_jobs_end_at_the_worker_with_the_longer_context(site: Site, priority: str) -> None:
    workers = [start(site, SHORT), start(site, LONG)]
    names = wait_for_contexts(site, SHORT, LONG)
    longer = [submit_long(site, priority=priority, retries=0, stream=True) for _ in range(12)]
    shorter = site.submit_many(["a"] * 6, priority=priority)
    for job in longer:
        chunks = list(job.stream(timeout=PATIENCE))
        assert chunks[-1].choices[0].finish_reason == "stop"
    for job in shorter:
        job.result(timeout=PATIENCE)
    assert [worker.stop() for worker in workers] == [0, 0]
    site.assert_settled([*longer, *shorter])
    rows = [site.row(job) for job in longer]
    assert {row["worker_id"] for row in rows} == {names[LONG]}
    assert {row["attempt"] for row in rows} == {1} and not any(row["failures"] for row in rows)


def test_the_short_worker_leaves_what_it_claims_and_fails_it_when_the_longer_one_dies(
    site: Site,
) -> None:
    start(site, SHORT, lease_seconds=6.0)
    long = start(site, LONG, lease_seconds=6.0)
    wait_for_contexts(site, SHORT, LONG)
    long.freeze()  # it claims nothing, and its lease holds for some seconds
    job = submit_long(site)
    wait_until(lambda: left(job, site))
    long.kill()
    assert_too_long(job, f"the context of {SHORT}$")
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert site.row(job)["error_type"] == "context_length_exceeded"


def test_a_long_job_waits_for_a_worker_that_publishes_nothing_now(site: Site) -> None:
    start(site, SHORT, lease_seconds=30.0)
    long = start(site, LONG, lease_seconds=30.0)
    name = wait_for_contexts(site, SHORT, LONG)[LONG]
    long.freeze()
    site.redis.delete(keys.worker(name))
    job = submit_long(site)
    wait_until(lambda: left(job, site))
    long.thaw()
    assert job.result(timeout=PATIENCE).choices[0].finish_reason == "stop"


def test_a_worker_that_published_nothing_and_is_shorter_holds_no_job(site: Site) -> None:
    start(site, SHORT, lease_seconds=6.0)
    other = start(site, SHORT + 1, lease_seconds=6.0)
    name = wait_for_contexts(site, SHORT, SHORT + 1)[SHORT + 1]
    other.freeze()
    site.redis.delete(keys.worker(name))
    job = submit_long(site)
    wait_until(lambda: left(job, site))
    other.thaw()
    assert_too_long(job, f"context of (its workers is )?{SHORT + 1}$|the context of {SHORT}")


def test_a_job_whose_longer_worker_dies_while_it_runs_ends_at_another_one(site: Site) -> None:
    start(site, SHORT)
    longer = [start(site, LONG, delay=0.1) for _ in range(2)]
    wait_until(lambda: len(read_statuses(site.redis).contexts("fake", CHAT.func)) == 3)
    pids = {one["name"]: one["pid"] for one in read_workers(site.redis)}
    by_name = {name: one for one in longer for name, pid in pids.items() if pid == one.pid}
    job = site.submit(LONG_PROMPT, words=40, stream=True)
    wait_until(lambda: site.hash(job).get("worker_name") in by_name)
    by_name[site.hash(job)["worker_name"]].kill()
    assert job.result(timeout=PATIENCE).usage.completion_tokens == 40
    site.client.wait_for_rows([job], timeout=PATIENCE)
    assert len(site.written()) == 1


def test_a_job_that_is_too_long_for_all_workers_fails_with_the_longest_context(site: Site) -> None:
    workers = [start(site, SHORT), start(site, 128)]
    wait_for_contexts(site, SHORT, 128)
    jobs = [site.submit("word " * 300) for _ in range(8)]
    for job in jobs:
        assert_too_long(job, "the context of 128|the longest context of its workers is 128")
    assert [worker.stop() for worker in workers] == [0, 0]
    site.assert_settled(jobs)


def test_one_worker_alone_fails_a_job_that_is_too_long(site: Site) -> None:
    start(site, SHORT)
    job = submit_long(site)
    assert_too_long(job, f"the context of {SHORT}$")
    assert not left(job, site)
