"""Foreign values in the keys of one job are named, and fail only their readers."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import Client, JobError, keys
from jobs.client.dead_letters import Selection, find_jobs
from jobs.client.rq_format import FAILURES, job_key, results_key
from jobs.client.state import Status
from jobs.results.failures import parse_failures
from tests.jobs.conftest import StepwiseWorker

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
        job.result(timeout=5)


def test_foreign_failures_and_errors_do_not_end_a_list_of_jobs(client: Client) -> None:
    client.serving = None
    job = client.submit(REQUEST)
    one = '{"attempt":1,"at":%s,"worker":"w","code":"c","message":"m"}'
    for at in ("NaN", "Infinity", "1e300", "-1", "1" + "0" * 400):
        assert parse_failures(f"[{one % at}]".encode()) == []
    client.redis.hset(job_key(job.id), mapping={FAILURES: "x", "chatjobs_error": "[" * 100_000})
    (found,) = find_jobs(client.redis, Selection((Status.QUEUED,)))
    assert found.code == "internal"
