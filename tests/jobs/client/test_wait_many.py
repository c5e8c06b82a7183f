"""Waiting for many jobs at once: as they end, all of them in order, and until their rows exist."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jobs import AsyncClient, Client, Job, JobError, keys
from jobs.api.params import RequestFields
from jobs.client import wait
from jobs.store.connection.sync_driver import SyncConnection
from jobs.store.rq_layout import job_key
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

REQUEST: RequestFields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
LOST = JobError("worker_lost", "three workers died")


def submit(client: Client, count: int, run: str | None = None) -> list[Job]:
    return client.submit_many([{**REQUEST, "job": {"run": run}} for _ in range(count)])


@contextmanager
def in_background(work: Callable[[], Any]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def end(worker: StepwiseWorker, job: Job, text: str | JobError) -> None:
    worker.start(job.id)
    if isinstance(text, JobError):
        worker.fail(job.id, text)
    else:
        worker.finish(job.id, text)


def test_jobs_come_as_they_end(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 4)
    end(worker, jobs[3], "early")
    found = client.as_completed([*jobs, jobs[0]], timeout=PATIENCE)
    assert next(found) is jobs[3]
    end(worker, jobs[1], LOST)
    assert next(found) is jobs[1]
    end(worker, jobs[2], "c")
    end(worker, jobs[0], "a")
    assert {job.id for job in found} == {jobs[0].id, jobs[2].id}


def test_a_job_ends_while_it_is_waited_for(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 3)
    with in_background(lambda: end(worker, jobs[1], "b")):
        assert next(iter(client.as_completed(jobs, timeout=PATIENCE))) is jobs[1]


def test_completions_are_gathered_in_order(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 3)

    def work() -> None:
        for job, text in zip(reversed(jobs), "cba", strict=True):
            end(worker, job, text)

    with in_background(work):
        found = client.gather(*jobs, jobs[0], timeout=PATIENCE)
    assert [one.text for one in found] == ["a", "b", "c", "a"]
    assert client.gather() == []


def test_an_error_is_raised_at_once_or_returned(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 3)
    end(worker, jobs[1], LOST)
    with pytest.raises(JobError, match="three workers died"):
        client.gather(*jobs, timeout=PATIENCE)
    for job in (jobs[0], jobs[2]):
        end(worker, job, "fine")
    first, second, third, absent = client.gather(
        *jobs, client.job("nobody"), timeout=PATIENCE, return_exceptions=True
    )
    assert not isinstance(first, JobError) and not isinstance(third, JobError)
    assert first.text == third.text == "fine"
    assert isinstance(second, JobError) and second.code == "worker_lost"
    assert isinstance(absent, JobError) and "no job 'nobody'" in absent.message


def test_a_timeout_says_how_many_have_not_ended(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 3)
    end(worker, jobs[0], "a")
    found = client.as_completed(jobs, timeout=0.1)
    assert next(found) is jobs[0]
    with pytest.raises(JobError) as caught:
        next(found)
    assert caught.value.code == "timeout"
    assert caught.value.message.startswith("2 of 3 jobs have not ended after 0.1 s (such as ")
    assert "status: queued" in caught.value.message
    with pytest.raises(JobError, match="2 of 3 jobs have not ended"):
        client.gather(*jobs, timeout=0.1, return_exceptions=True)


def test_what_has_ended_is_found_without_waiting(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 2)
    for job in jobs:
        end(worker, job, "x")
    assert {job.id for job in client.as_completed(jobs, timeout=0)} == {job.id for job in jobs}


def test_an_end_that_is_not_published_is_found(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ's tools end jobs without a message. There are more jobs than one pipeline reads."""
    monkeypatch.setattr(wait, "STATES_AT_ONCE", 3)
    monkeypatch.setattr(wait, "SILENCE_SECONDS", 0.05)
    jobs = submit(client, 9)
    found = client.as_completed(jobs, timeout=PATIENCE)
    end(worker, jobs[0], "first")
    assert next(found) is jobs[0]
    with in_background(lambda: client.redis.hset(job_key(jobs[8].id), "status", "failed")):
        assert next(found) is jobs[8]
    for job in jobs[1:8]:
        end(worker, job, "x")
    assert {job.id for job in found} == {job.id for job in jobs[1:8]}


def test_many_jobs_are_waited_for_over_two_connections(
    client: Client, worker: StepwiseWorker
) -> None:
    jobs = submit(client, 600)
    before = client.redis.info("stats")["total_connections_received"]

    def work() -> None:
        for number, job in enumerate(jobs):
            end(worker, job, str(number))

    with in_background(work):
        found = client.gather(*jobs, timeout=PATIENCE)
    assert [one.text for one in found] == [str(number) for number in range(600)]
    # Those of the worker and of the messages.
    assert client.redis.info("stats")["total_connections_received"] <= before + 2


def test_asyncio(client: Client, worker: StepwiseWorker, redis_url: str) -> None:
    async def run() -> None:
        async with AsyncClient(redis_url) as aclient:
            jobs = await aclient.submit_many([REQUEST, REQUEST])
            end(worker, client.job(jobs[1].id), "b")
            found = aclient.as_completed(jobs, timeout=PATIENCE)
            assert await anext(found) is jobs[1]
            end(worker, client.job(jobs[0].id), LOST)
            assert [job async for job in found] == [jobs[0]]
            with pytest.raises(JobError, match="three workers died"):
                await aclient.gather(*jobs)
            error, answer = await aclient.gather(*jobs, return_exceptions=True)
            assert isinstance(error, JobError) and not isinstance(answer, JobError)
            assert answer.text == "b"
            assert await aclient.gather() == []
            await aclient.wait_for_rows(jobs, timeout=PATIENCE)
            record(client, "default")
            with pytest.raises(JobError, match="1 row of run 'default'"):
                await aclient.wait_for_rows(jobs, timeout=0.2)

    asyncio.run(run())


# Rows. The fake worker writes none: the tests fill the outbox.


def record(client: Client, run: str) -> Any:
    return client.redis.xadd(keys.outbox(run), {"row": "{}"})


def test_rows_are_waited_for_until_they_have_left_the_outbox(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = submit(client, 1, "sums")
    end(worker, job, "x")
    entry = record(client, "sums")
    record(client, "other")
    with pytest.raises(JobError) as caught:
        client.wait_for_rows([job], timeout=0.2)
    assert caught.value.code == "timeout"
    assert "the jobs have ended, but 1 row of run 'sums' is not in Parquet after 0.2 s" in str(
        caught.value
    )

    def write(connection: SyncConnection, seconds: float) -> None:
        """In the first pause: a later job's row comes, and this job's is written."""
        record(client, "sums")
        client.redis.xdel(keys.outbox("sums"), entry)

    monkeypatch.setattr(SyncConnection, "sleep", write)
    client.wait_for_rows([job], timeout=PATIENCE)
    assert client.redis.xlen(keys.outbox("sums")) == 1


def test_jobs_that_have_not_ended_are_named_first(client: Client, worker: StepwiseWorker) -> None:
    jobs = submit(client, 2)
    end(worker, jobs[0], "x")
    with pytest.raises(JobError, match=f"1 of 2 jobs has not ended .*such as {jobs[1].id}"):
        client.wait_for_rows(jobs, timeout=0.1)


def test_rows_of_an_unknown_job_are_an_error(client: Client) -> None:
    with pytest.raises(JobError, match="no job 'nobody' in Redis"):
        client.wait_for_rows([client.job("nobody")], timeout=1)


def test_a_handle_made_from_an_id_waits_for_its_own_run(
    client: Client, worker: StepwiseWorker
) -> None:
    (job,) = submit(client, 1, "sums")
    end(worker, job, "x")
    record(client, "sums")
    with pytest.raises(JobError, match="run 'sums'"):
        client.wait_for_rows([client.job(job.id)], timeout=0.2)
