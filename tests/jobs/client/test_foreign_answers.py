"""Foreign values in the keys of one job are named, and fail only their readers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from jobs import AsyncClient, Client, Job, JobError, keys
from jobs.results.failures import parse_failures
from jobs.store.connection.protocol import iterate_sync
from jobs.store.find_jobs import Selection, find_jobs
from jobs.store.job_state import Status
from jobs.store.rq_layout import FAILURES, job_key, results_key
from tests.jobs.conftest import StepwiseWorker
from tests.waiting import PATIENCE

REQUEST: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
}
JUNK = ["junk", "[" * 100_000, "[]", "3", "{}", '{"p":3}', '{"p":[3]}', '{"p":[{"i":0,"l":[3]}]}']


@pytest.mark.parametrize("payload", [value for value in JUNK if value != "{}"])
def test_a_foreign_entry_of_the_log_is_named(client: Client, payload: str) -> None:
    client.serving = None
    job = client.submit(REQUEST)
    client.redis.xadd(keys.log(job.id), {"d": payload}, id="1-1")
    with pytest.raises(JobError, match=r"another program has written the entry 1-1"):
        list(job.stream())


@pytest.mark.parametrize("message", [*JUNK, '{"id":3,"d":{}}', '{"id":"x","d":{}}'])
def test_a_foreign_message_is_ignored(client: Client, worker: StepwiseWorker, message: str) -> None:
    client.serving = None
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "a")
    stream = job.stream()
    assert next(stream).text == "a"
    client.redis.publish(keys.live(job.id), message)
    worker.write(job.id, 1, 2, "b")
    worker.finish(job.id, "ab")
    assert "".join(chunk.text for chunk in stream) == "b"


@pytest.mark.parametrize("value", ["junk", "e30", "!!!!"])
def test_a_foreign_result_is_named(client: Client, worker: StepwiseWorker, value: str) -> None:
    client.serving = None
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.finish(job.id, "a")
    client.redis.xadd(results_key(job.id), {"type": "9", "return_value": value})
    with pytest.raises(JobError, match=r"result .*(another program|not a chat completion)"):
        job.result(timeout=PATIENCE)


def test_foreign_failures_and_errors_do_not_end_a_list_of_jobs(client: Client) -> None:
    client.serving = None
    job = client.submit(REQUEST)
    one = '{"attempt":1,"at":%s,"worker":"w","code":"c","message":"m"}'
    for at in ("NaN", "Infinity", "1e300", "-1", "1" + "0" * 400):
        assert parse_failures(f"[{one % at}]".encode()) == []
    client.redis.hset(job_key(job.id), mapping={FAILURES: "x", "chatjobs_error": "[" * 100_000})
    (found,) = iterate_sync(find_jobs(Selection((Status.QUEUED,))), client.connection)
    assert found.code == "internal"


def overwrite(client: Client, key: str) -> str:
    """Another program writes the key. Returns what an error must say."""
    client.redis.delete(key)
    client.redis.set(key, "x")
    return f"RENAME '{re.escape(key)}'"


OF_A_JOB: dict[str, Callable[[str], str]] = {
    "hash": job_key,
    "result": results_key,
    "log": keys.log,
}
READERS: dict[str, Callable[[Job], object]] = {
    "status": lambda job: job.status(),
    "result": lambda job: job.result(timeout=PATIENCE),
    "request": lambda job: job.request,
    "stream": lambda job: list(job.stream()),
    "cancel": lambda job: job.cancel(),
}


@pytest.mark.parametrize(
    ("key_of", "how"),
    [
        *(("hash", how) for how in READERS),
        *(("result", how) for how in ("result", "stream")),
        ("log", "stream"),
    ],
)
def test_errors_about_a_job_name_the_key_of_another_type(
    client: Client, worker: StepwiseWorker, key_of: str, how: str
) -> None:
    client.serving = None
    submitted = client.submit(REQUEST)
    worker.start(submitted.id)
    worker.finish(submitted.id, "a")
    sentence = overwrite(client, OF_A_JOB[key_of](submitted.id))
    with pytest.raises(JobError, match=sentence) as caught:
        READERS[how](client.job(submitted.id))
    assert caught.value.code == "internal"


@pytest.mark.parametrize("key_of", OF_A_JOB)
def test_async_errors_about_a_job_name_the_key_of_another_type(
    client: Client, worker: StepwiseWorker, redis_url: str, key_of: str
) -> None:
    client.serving = None
    submitted = client.submit(REQUEST)
    worker.start(submitted.id)
    worker.finish(submitted.id, "a")
    sentence = overwrite(client, OF_A_JOB[key_of](submitted.id))

    async def read() -> None:
        async with AsyncClient(redis_url) as other:
            async for _ in other.job(submitted.id).stream():
                pass

    with pytest.raises(JobError, match=sentence):
        asyncio.run(read())


@pytest.mark.parametrize("key_of", [keys.outbox, lambda run: keys.OUTBOXES])
def test_a_cancel_that_can_write_no_row_names_the_key(
    client: Client, key_of: Callable[[str], str]
) -> None:
    client.serving = None
    request: Any = {**REQUEST, "job": {"run": "r"}}
    job = client.submit(request)
    sentence = overwrite(client, key_of("r"))
    with pytest.raises(JobError, match=sentence):
        job.cancel()


@pytest.mark.parametrize(
    "key",
    [
        keys.TENANT_JOBS,
        keys.OPEN_BYTES,
        keys.LIMITS,
        keys.tenants("chat:demo"),
        keys.tenant_queue("chat:demo", "t"),
        keys.rows("r", 0),
        "rq:queue:chat:demo",
        "rq:queues",
    ],
)
def test_a_submit_names_the_key_of_another_type(client: Client, key: str) -> None:
    client.serving = None
    request: Any = {**REQUEST, "job": {"run": "r", "row": 0, "tenant": "t"}}
    sentence = overwrite(client, key)
    with pytest.raises(JobError, match=sentence) as caught:
        client.submit(request)
    assert caught.value.message.startswith("the job can't be enqueued: ")


@pytest.mark.parametrize("key_of", [keys.session, keys.open_turns])
def test_a_turn_names_the_key_of_another_type(client: Client, key_of: Callable[[str], str]) -> None:
    client.serving = None
    session = client.session("s", model="demo")
    sentence = overwrite(client, key_of("s"))
    with pytest.raises(JobError, match=sentence):
        session.submit("a")


def test_a_job_that_can_not_be_read_holds_back_no_other_that_is_waited_for(
    client: Client, worker: StepwiseWorker
) -> None:
    client.serving = None
    good, bad = (client.submit(REQUEST) for _ in range(2))
    worker.start(good.id)
    worker.finish(good.id, "a")
    sentence = overwrite(client, job_key(bad.id))
    answer, error = client.gather([good, bad], timeout=PATIENCE, return_exceptions=True)
    assert not isinstance(answer, JobError) and answer.text == "a"
    assert isinstance(error, JobError) and re.search(sentence, error.message)
    assert {job.id for job in client.as_completed([bad, good], timeout=PATIENCE)} == {
        good.id,
        bad.id,
    }
    with pytest.raises(JobError, match=sentence):
        client.gather([bad, good], timeout=PATIENCE)
