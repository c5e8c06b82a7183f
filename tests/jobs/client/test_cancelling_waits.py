"""Waits that end with their caller's patience: the job is cancelled, and the error says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from jobs import AsyncClient, Client, JobError, WaitTimeout
from jobs.client import cancelling_waits
from jobs.client.job import Job
from jobs.store.connection.protocol import Steps, run_sync
from jobs.store.job_end import cancel
from jobs.testing import FakeWorker
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def job_in(message: str) -> str:
    return message.split()[1]


@pytest.mark.parametrize("call", ["send", "create"])
def test_a_call_whose_time_has_passed_says_that_its_job_is_cancelled(
    client: Client, call: str
) -> None:
    client.serving = None
    session = client.session(model="demo")
    with pytest.raises(WaitTimeout) as caught:
        if call == "send":
            session.send("a", timeout=0.01)
        else:
            client.chat.completions.create(model="demo", messages=MESSAGES, timeout=0.01)
    message = caught.value.message
    assert "has not ended after 0.01 s (status: queued)" in message
    assert "; it is cancelled now" in message
    assert "not cancelled" not in message
    assert client.job(job_in(message)).status() == "cancelled"


def test_an_async_call_whose_time_has_passed_says_that_its_job_is_cancelled(
    client: Client, redis_url: str
) -> None:
    async def send() -> list[str]:
        async with AsyncClient(redis_url) as asynchronous:
            asynchronous._producer.serving = None
            session = await asynchronous.session(model="demo")
            create = asynchronous.chat.completions.create
            with pytest.raises(WaitTimeout) as one:
                await session.send("a", timeout=0.01)
            with pytest.raises(WaitTimeout) as two:
                await create(model="demo", messages=MESSAGES, timeout=0.01)
            return [one.value.message, two.value.message]

    for message in asyncio.run(send()):
        assert "; it is cancelled now" in message
        assert client.job(job_in(message)).status() == "cancelled"


def test_an_answer_that_comes_while_the_job_is_cancelled_is_returned(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.serving = None
    job = client.submit({"model": "demo", "messages": MESSAGES})

    def too_late(job_id: str) -> Steps[bool]:
        worker.start(job_id)
        worker.finish(job_id, "x")
        return (yield from cancel(job_id))

    monkeypatch.setattr(cancelling_waits, "cancel", too_late)
    steps = cancelling_waits.wait_or_cancel(job.id, 0.01)
    assert run_sync(steps, client.connection).text == "x"


def test_a_job_that_cannot_be_cancelled_is_not_called_cancelled(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.serving = None
    job = client.submit({"model": "demo", "messages": MESSAGES})

    def fails(job_id: str) -> Steps[bool]:
        yield from ()
        raise JobError("unavailable", "Redis is gone")

    monkeypatch.setattr(cancelling_waits, "cancel", fails)
    with pytest.raises(WaitTimeout, match="it is not cancelled"):
        run_sync(cancelling_waits.wait_or_cancel(job.id, 0.01), client.connection)


@pytest.mark.parametrize("call", ["create", "stream", "send"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_within_submit_cancels_the_job(client: Client, call: str, when: str) -> None:
    client.serving = None
    submit, sent = client.submit, list[str]()

    def interrupted(request: Any, **options: Any) -> Job:
        if when == "after":
            sent.append(submit(request, **options).id)
        raise KeyboardInterrupt

    client.submit = interrupted  # type: ignore[assignment]
    session = client.session(model="demo")
    options: list[Any] = [{}, {"id": "named"}, {"run": "r", "row": 3}]
    for job in options:
        fields: Any = {"model": "demo", "messages": MESSAGES, "extra_body": {"job": job}}
        with pytest.raises(KeyboardInterrupt):
            if call == "send":
                session.send("a", wait=True, job=job)
            else:
                client.chat.completions.create(**fields, stream=call == "stream")
    states = [client.job(one).status().value for one in sent]
    waits = "deferred" if call == "send" else "queued"  # behind the turn before it
    named = ["queued", waits]
    assert states == (["cancelled", *named] if when == "after" else [])


def test_jobs_and_lists_of_jobs_are_awaited() -> None:
    with FakeWorker("x") as worker:
        client = worker.client()
        jobs = client.submit_many([{"model": "m", "messages": MESSAGES}] * 3)
        assert [one.text for one in client.gather(jobs)] == ["x"] * 3
        assert [one.text for one in client.gather(*jobs, timeout=PATIENCE)] == ["x"] * 3
        assert len(client.gather(iter(jobs), return_exceptions=True)) == 3
        assert client.gather([]) == client.gather() == []
        assert len(list(client.as_completed(jobs))) == 3
        client.wait_for_rows(jobs)


@pytest.mark.parametrize("given", [None, 5, "abc", [None], ["abc"], [["abc"]]])
def test_what_is_no_job_is_not_awaited(given: Any) -> None:
    with FakeWorker("x") as worker:
        client = worker.client()
        for wait in (
            client.gather,
            client.wait_for_rows,
            lambda one: list(client.as_completed(one)),
        ):
            with pytest.raises(
                JobError, match="a job or a list of jobs is needed here; got"
            ) as caught:
                wait(given)
            assert caught.value.code == "invalid_request"


def test_an_async_client_awaits_lists_of_jobs() -> None:
    async def gather(client: AsyncClient) -> None:
        jobs = await client.submit_many([{"model": "m", "messages": MESSAGES}] * 2)
        assert [one.text for one in await client.gather(jobs)] == ["x", "x"]
        assert [one.text for one in await client.gather(*jobs, timeout=PATIENCE)] == ["x", "x"]
        with pytest.raises(JobError, match="a job or a list of jobs is needed here; got 5"):
            await client.gather(5)  # type: ignore[call-overload]

    with FakeWorker("x") as worker:
        asyncio.run(gather(worker.async_client()))
