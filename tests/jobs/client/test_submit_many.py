"""`submit_many` of an iterator keeps a window of requests; results are kept as the client says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import AsyncClient, AsyncJob, ChatRequest, Client, JobError
from jobs.api.params import RequestFields
from jobs.errors import InvalidRequest
from jobs.store.enqueue import BATCH
from jobs.store.expiry import BULK_RESULT_SECONDS, RESULT_SECONDS
from jobs.store.rq_layout import job_key

REQUEST: RequestFields = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


def queued(client: Client) -> int:
    return int(client.redis.llen("rq:queue:chat:demo"))


def test_an_iterator_is_read_in_windows(client: Client) -> None:
    ahead: list[int] = []

    def requests() -> Iterator[Any]:
        for number in range(2 * BATCH + 1):
            ahead.append(number - queued(client))
            yield {**REQUEST, "seed": number}

    jobs = client.submit_many(requests())
    assert len(jobs) == queued(client) == 2 * BATCH + 1
    assert max(ahead) < BATCH
    assert [job.request.seed for job in (jobs[0], jobs[-1])] == [0, 2 * BATCH]


def test_a_bad_request_that_is_alone_has_no_number(client: Client) -> None:
    wrong: Any = {**REQUEST, "temperature": "x"}
    with pytest.raises(InvalidRequest, match=r"^invalid_request: temperature: expected a number"):
        client.submit_many([wrong])


def test_a_bad_request_of_an_iterator_says_how_many_are_enqueued(client: Client) -> None:
    wrong: Any = {**REQUEST, "temperature": "x"}
    requests = [REQUEST] * (BATCH + 3) + [wrong]
    with pytest.raises(InvalidRequest, match=rf"request {BATCH + 3}: temperature") as caught:
        client.submit_many(iter(requests))
    assert caught.value.message.endswith(f"; {BATCH} requests are enqueued")
    assert caught.value.param == "temperature"
    assert queued(client) == BATCH
    with pytest.raises(InvalidRequest):
        client.submit_many(requests)
    assert queued(client) == BATCH  # those of a list are checked before any is enqueued


def test_a_refused_request_of_an_iterator_says_how_many_are_enqueued(client: Client) -> None:
    client.submit({**REQUEST, "seed": 1, "job": {"id": "mine"}})
    requests = [REQUEST] * (BATCH + 1) + [{**REQUEST, "job": {"id": "mine"}}] + [REQUEST] * BATCH
    with pytest.raises(JobError, match=rf"request {BATCH + 1}: job.id: 'mine' is taken") as caught:
        client.submit_many(iter(requests))
    assert caught.value.message.endswith(f"{2 * BATCH - 1} of {2 * BATCH} requests are enqueued")
    assert queued(client) == 2 * BATCH  # with the first one


def test_an_async_client_reads_no_request_of_an_iterator_back(
    redis_url: str, client: Client
) -> None:
    async def submit() -> list[AsyncJob]:
        async with AsyncClient(redis_url) as submitting:
            return await submitting.submit_many(iter([REQUEST] * BATCH))

    def reads() -> int:
        return int(client.redis.info("commandstats").get("cmdstat_hmget", {"calls": 0})["calls"])

    before = reads()
    client.submit_many(iter([REQUEST] * BATCH))
    needed = reads() - before
    assert len(asyncio.run(submit())) == BATCH
    assert reads() == before + 2 * needed


def test_results_are_kept_as_the_job_else_the_client_says(redis_url: str) -> None:
    with Client(redis_url) as usual, Client(redis_url, result_ttl=50) as brief:
        kept = {
            usual.submit(REQUEST).id: RESULT_SECONDS,
            usual.submit({**REQUEST, "job": {"priority": "bulk"}}).id: BULK_RESULT_SECONDS,
            usual.submit({**REQUEST, "job": {"result_ttl": 70}}).id: 70,
            brief.submit(REQUEST).id: 50,
            brief.submit_many(iter([REQUEST]))[0].id: 50,
            brief.submit({**REQUEST, "job": {"result_ttl": 70, "priority": "bulk"}}).id: 70,
        }
        for job, seconds in kept.items():
            assert usual.redis.hget(job_key(job), "result_ttl") == b"%d" % seconds


@pytest.mark.parametrize("seconds", [0, -1, 1.5, True, "60"])
def test_an_invalid_result_ttl_of_a_client_is_refused(redis_url: str, seconds: Any) -> None:
    with pytest.raises(InvalidRequest, match="result_ttl: a whole number of seconds"):
        Client(redis_url, result_ttl=seconds)


@pytest.mark.parametrize("one", [REQUEST, ChatRequest.parse(REQUEST), "{}"])
def test_one_request_is_not_many(client: Client, one: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"a list or an iterator of requests, got one request"):
        client.submit_many(one)
