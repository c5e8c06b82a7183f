"""The client API: submit, wait, follow and cancel, with and without asyncio."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
from redis import ResponseError
from rq import Queue
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import Client, JobError, keys
from jobs.api.params import RequestFields
from jobs.operations import CHAT
from jobs.store.connection.connect import check_server, redis_failure
from jobs.store.damage import Unwritable
from jobs.store.job_state import Status
from jobs.testing import Answer, FakeWorker
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

REQUEST: RequestFields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def test_a_job_is_a_plain_rq_job_in_json(client: Client) -> None:
    job = client.submit({**REQUEST, "temperature": 0})
    stored = RQJob.fetch(job.id, connection=client.redis, serializer=JSONSerializer)
    assert stored.func_name == CHAT.func
    assert stored.kwargs["request"]["temperature"] == 0
    queue = Queue("chat:demo", connection=client.redis, serializer=JSONSerializer)
    assert queue.job_ids == [job.id]
    assert str(job.status()) == Status.QUEUED.value == "queued"
    assert "hi" not in (stored.description or "")


def test_bulk_jobs_keep_their_order_in_the_bulk_queue(client: Client) -> None:
    bulk: RequestFields = {**REQUEST, "job": {"priority": "bulk"}}
    jobs = client.submit_many([bulk] * 1200)
    queue = Queue("bulk:demo", connection=client.redis, serializer=JSONSerializer)
    assert queue.job_ids == [job.id for job in jobs]


def test_a_bad_request_enqueues_nothing(client: Client) -> None:
    with pytest.raises(JobError, match="request 1: temperature"):
        client.submit_many([REQUEST, {**REQUEST, "temperature": -1}])
    assert not client.redis.keys("rq:queue:*")


def test_a_request_that_cannot_be_serialised_enqueues_nothing(client: Client) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    with pytest.raises(JobError, match="request 600: chat_template_kwargs is nested deeper than"):
        client.submit_many([*[REQUEST] * 600, {**REQUEST, "chat_template_kwargs": deep}])
    assert not client.redis.keys("rq:queue:*")


def test_a_request_that_no_worker_would_read_is_refused_with_its_size(client: Client) -> None:
    large: RequestFields = {**REQUEST, "messages": [{"role": "user", "content": "x" * 98_000_000}]}
    with pytest.raises(JobError) as caught:
        client.submit(large)
    assert caught.value.code == "invalid_request"
    assert caught.value.message == (
        "the request has 98.0 MB as JSON, and the limit (request_bytes) is 67.1 MB: shorten it; "
        "nothing was enqueued"
    )
    with pytest.raises(JobError, match=r"request 1: the request has 98\.0 MB as JSON"):
        client.submit_many([REQUEST, large])
    assert not client.redis.exists("rq:queue:chat:demo")


def test_any_client_can_wait_for_a_result(client: Client, worker: StepwiseWorker) -> None:
    job = client.submit(REQUEST)

    def work() -> None:
        time.sleep(0.1)
        worker.start(job.id)
        worker.finish(job.id, "forty-two")

    thread = threading.Thread(target=work)
    thread.start()
    assert client.job(job.id).result(timeout=PATIENCE).text == "forty-two"
    thread.join()
    assert job.result().text == "forty-two"
    assert job.status() == Status.FINISHED


def test_a_failed_job_raises_its_own_error() -> None:
    error = JobError("context_length_exceeded", "too long", "messages")
    job = FakeWorker(error).client().submit(REQUEST)
    with pytest.raises(JobError, match="too long") as caught:
        job.result(timeout=PATIENCE)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_waiting_ends_at_its_timeout(client: Client) -> None:
    with pytest.raises(JobError) as caught:
        client.submit(REQUEST).result(timeout=0.2)
    assert caught.value.code == "timeout"
    assert "has not ended after 0.2 s (status: queued): no worker serves" in caught.value.message
    assert caught.value.message.endswith("it is not cancelled, and can be waited for again")


def test_a_queued_job_is_cancelled_at_once_with_its_row(client: Client) -> None:
    job = client.submit(REQUEST)
    assert job.cancel()
    assert job.status() == Status.CANCELLED
    assert not client.redis.llen("rq:queue:chat:demo")
    assert client.redis.xlen(keys.outbox("default")) == 1
    with pytest.raises(JobError) as caught:
        job.result(timeout=1)
    assert caught.value.code == "cancelled"
    with pytest.raises(JobError):
        list(job.stream())
    assert not job.cancel()


def test_a_running_job_is_asked_to_stop() -> None:
    client = FakeWorker("one two").client()
    job = client.submit(REQUEST)
    next(job.stream())
    assert job.cancel()
    assert client.redis.hget(RQJob.key_for(job.id), "chatjobs_cancel") == b"1"
    assert job.status() == Status.STARTED


@pytest.mark.parametrize("call", ["result", "cancel", "stream"])
def test_an_unknown_job_is_an_error(client: Client, call: str) -> None:
    with pytest.raises(JobError, match="no job 'nobody' in Redis"):
        list(getattr(client.job("nobody"), call)() or ())


def test_an_unreachable_redis_is_named_without_its_password() -> None:
    client = Client("redis://user:secret@127.0.0.1:1/0")
    with pytest.raises(JobError, match=r"can't reach Redis at 127\.0\.0\.1:1") as caught:
        client.submit(REQUEST)
    assert "secret" not in str(caught.value)


def test_a_redis_in_protected_mode_is_explained_in_one_sentence(client: Client) -> None:
    text = "DENIED Redis is running in protected mode because protected mode is enabled and …"
    error = redis_failure(client.redis, ResponseError(text))
    assert error.code == "unavailable"
    assert "is in protected mode and refuses other machines" in error.message
    assert "DENIED" not in error.message


def test_a_redis_whose_disk_is_full_is_unavailable(client: Client) -> None:
    text = "MISCONF Errors writing to the AOF file: No space left on device"
    error = redis_failure(client.redis, Unwritable(text))
    assert error.code == "unavailable"
    assert f"takes no writes for now: {text}; make its disk writable" in error.message


def test_a_redis_that_does_not_know_flags_of_scripts_is_too_old(client: Client) -> None:
    text = "Error compiling script (new function): user_script:1: unexpected symbol near '#'"
    error = redis_failure(client.redis, ResponseError(text))
    assert "is too old: chatjobs needs Redis 7.0 or newer" in error.message


@pytest.mark.parametrize(("version", "too_old"), [("6.2.14", True), ("7.0.0", False)])
def test_a_worker_refuses_an_old_redis(
    client: Client, monkeypatch: pytest.MonkeyPatch, version: str, too_old: bool
) -> None:
    monkeypatch.setattr(client.redis, "info", lambda _: {"redis_version": version})
    refusal = pytest.raises(JobError, match=r"is too old \(6\.2\.14\): chatjobs needs Redis 7\.0")
    with refusal if too_old else nullcontext():
        check_server(client.redis)


def test_an_invalid_redis_url_is_refused() -> None:
    with pytest.raises(JobError):
        Client("http://localhost").submit(REQUEST)


def test_the_asyncio_client_has_the_same_methods() -> None:
    worker = FakeWorker(["forty-two", Answer(delay=math.inf)])

    async def main() -> None:
        async with worker.async_client() as client:
            job = await client.submit(REQUEST)
            assert await job.status() == Status.QUEUED
            chunks = [chunk async for chunk in client.job(job.id).stream()]
            assert "".join(chunk.text for chunk in chunks) == "forty-two"
            assert (await job.result(timeout=PATIENCE)).text == "forty-two"
            other, third = await client.submit_many([REQUEST, REQUEST])
            assert await other.cancel()
            with pytest.raises(JobError, match="cancelled"):
                await other.result(timeout=PATIENCE)
            with pytest.raises(JobError) as caught:
                await third.result(timeout=0.1)
            assert caught.value.code == "timeout"

    asyncio.run(main())
