"""The connection for messages that all followers and waiters of a client share."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from jobs import AsyncClient, AsyncJob, ChatCompletion, Client, JobError, keys
from jobs.client import follow, wait
from jobs.store.connection import live
from jobs.store.connection.connect import connect_async
from jobs.store.preludes import QUEUE_LUA, STREAM_END_LUA
from jobs.store.rq_layout import job_key, result_fields, results_key
from tests.jobs.conftest import StepwiseWorker, completion_of
from tests.waiting import PATIENCE, wait_until

REQUEST: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
RESULTS, FOLLOWERS = 2_000, 1_000

END = QUEUE_LUA + STREAM_END_LUA + "\nend_stream(KEYS[1], KEYS[2], ARGV[1], ARGV[2], true)"


def end_all(client: Client, job_ids: Sequence[str]) -> None:
    """End jobs as a worker does, many in one round trip: result, status and end entry."""
    for start in range(0, len(job_ids), 500):
        pipeline = client.redis.pipeline(transaction=False)
        for number, job_id in enumerate(job_ids[start : start + 500], start):
            answer = completion_of(job_id, f"answer {number}").to_json()
            fields = result_fields(job_id, "finished", answer=answer)
            entry = dict(zip(fields[::2], fields[1::2], strict=True))
            pipeline.xadd(results_key(job_id), entry)
            pipeline.hset(job_key(job_id), mapping={"status": "finished", "chatjobs_attempt": 1})
            names = (keys.log(job_id), keys.live(job_id))
            pipeline.eval(END, len(names), *names, f"1-{2**53 - 1}", '{"end":"stop"}')
        pipeline.execute()


async def until_async(condition: Callable[[], Any], seconds: float = 500) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def live_threads() -> set[threading.Thread]:
    """Also those of clients that earlier tests have left to the garbage collector."""
    return {one for one in threading.enumerate() if one.name == "chatjobs-live"}


def subscriptions(client: Client) -> int:
    return len(client.redis.pubsub_channels("chatjobs:*"))


def connections(client: Client) -> int:
    count: int = client.redis.info("clients")["connected_clients"]
    return count


def received(client: Client) -> int:
    count: int = client.redis.info("stats")["total_connections_received"]
    return count


async def wait_for_all(
    client: Client, url: str, count: int, use: Callable[[AsyncJob], Any]
) -> list[Any]:
    """The result of `use` for `count` jobs that end when all of them are waited for."""
    ids = [job.id for job in client.submit_many([REQUEST] * count)]
    before, opened = connections(client), received(client)
    async with AsyncClient(url) as aclient:
        tasks = asyncio.gather(*[use(aclient.job(job_id)) for job_id in ids])
        await until_async(lambda: subscriptions(client) == count)
        found, _ = await asyncio.gather(tasks, asyncio.to_thread(end_all, client, ids))
        assert (
            connections(client) <= before + 6
        )  # the producer's, four for commands, one for messages
        assert received(client) <= opened + 20  # a slow machine may time out and reconnect
        await until_async(lambda: subscriptions(client) == 0)
    return found


@pytest.mark.timeout(600)
def test_2_000_results_are_awaited_over_five_connections(client: Client, redis_url: str) -> None:
    found: list[ChatCompletion] = asyncio.run(
        wait_for_all(client, redis_url, RESULTS, lambda job: job.result(timeout=500))
    )
    assert [one.text for one in found] == [f"answer {number}" for number in range(RESULTS)]


@pytest.mark.timeout(600)
def test_1_000_streams_are_followed_over_five_connections(client: Client, redis_url: str) -> None:
    async def text(job: AsyncJob) -> str:
        return "".join([chunk.text async for chunk in job.stream()])

    found = asyncio.run(wait_for_all(client, redis_url, FOLLOWERS, text))
    assert found == [f"answer {number}" for number in range(FOLLOWERS)]


def test_threads_share_one_subscription_connection(client: Client, worker: StepwiseWorker) -> None:
    jobs = client.submit_many([REQUEST] * 20)
    texts: dict[str, str] = {}

    def wait_for(number: int) -> None:
        job = jobs[number]
        texts[job.id] = "".join(chunk.text for chunk in job.stream())
        texts[job.id] += job.result(timeout=PATIENCE).text

    threads = [threading.Thread(target=wait_for, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    wait_until(lambda: subscriptions(client) == 20)
    assert len(client.redis.client_list(_type="pubsub")) == 1
    for number, job in enumerate(jobs):
        worker.start(job.id)
        worker.finish(job.id, f"{number}.")
    for thread in threads:
        thread.join()
    assert texts == {job.id: f"{number}.{number}." for number, job in enumerate(jobs)}


def test_the_connection_closes_when_nobody_listens(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = live_threads()
    monkeypatch.setattr(live, "IDLE_SECONDS", 0.05)
    for text in ("a", "b"):  # it opens again
        (job,) = client.submit_many([REQUEST])
        worker.start(job.id)
        worker.write(job.id, 1, 1, text)
        chunks = job.stream()
        next(chunks)
        thread = threading.Thread(target=lambda: list(chunks))  # noqa: B023
        thread.start()
        wait_until(lambda: subscriptions(client) == 1)
        worker.finish(job.id, text)
        thread.join()
        wait_until(lambda: not client.redis.client_list(_type="pubsub"))
        wait_until(lambda: live_threads() <= before)


def test_closing_the_client_ends_its_thread(redis_url: str, worker: StepwiseWorker) -> None:
    before = live_threads()
    with Client(redis_url) as client, pytest.raises(JobError, match="has not ended"):
        client.submit(REQUEST).result(timeout=0.01)
    assert live_threads() <= before


async def _loses_its_cancellation(subscribe: Callable[..., Any], *args: Any) -> None:
    """Send, and go on as asyncio.wait_for of Python 3.11 does when it is cancelled just then."""
    await subscribe(*args)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(PATIENCE)


def test_an_asyncio_client_closes_although_a_cancellation_is_lost(
    client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job,) = client.submit_many([REQUEST])
    subscribe = live._PubSub.subscribe
    monkeypatch.setattr(
        live._PubSub, "subscribe", lambda *args: _loses_its_cancellation(subscribe, *args)
    )

    async def run() -> None:
        async with AsyncClient(redis_url) as aclient:
            waiting = asyncio.create_task(aclient.job(job.id).result(timeout=PATIENCE))
            await until_async(lambda: subscriptions(client) == 1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert subscriptions(client) == 0


def test_a_connection_that_breaks_while_channels_change_is_opened_again(
    client: Client, redis_url: str
) -> None:
    """The reader and the writer of the connection both find it broken."""

    async def run() -> None:
        hub = live.Hub(connect_async(redis_url))
        task = asyncio.create_task(hub.run(lambda: False))
        kept = live.AsyncMailbox(["kept"], False, hub.remove)
        hub.add(kept)
        for number in range(10):
            other = live.AsyncMailbox([f"other-{number}"], False, hub.remove)
            hub.add(other)
            assert await other.get(PATIENCE) == [live.Event(f"other-{number}", None)]
            client.redis.client_kill_filter(_type="pubsub")
            other.close()
            await asyncio.sleep(0)
        await until_async(lambda: b"kept" in client.redis.pubsub_channels())
        assert not task.done()
        hub.end(task)
        await asyncio.gather(task, return_exceptions=True)
        await hub._client.aclose()

    asyncio.run(run())


def test_a_lost_connection_is_opened_again(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No state is read but after a message: the wait ends by the new subscription alone."""
    monkeypatch.setattr(wait, "SILENCE_SECONDS", 1000.0)
    job = client.submit(REQUEST)
    worker.start(job.id)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(job.result(timeout=PATIENCE).text))
    thread.start()
    wait_until(lambda: subscriptions(client) == 1)
    for _ in range(3):
        (first,) = client.redis.client_list(_type="pubsub")
        worker.redis.client_kill_filter(_type="pubsub")
        wait_until(
            lambda: any(
                one["id"] != first["id"]  # noqa: B023
                for one in client.redis.client_list(_type="pubsub")
            )
        )
        wait_until(lambda: subscriptions(client) == 1)
    worker.finish(job.id, "whole")
    thread.join()
    assert found == ["whole"]


def test_an_end_while_the_connection_is_lost_is_found(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "SILENCE_SECONDS", 1000.0)
    job = client.submit(REQUEST)
    worker.start(job.id)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(job.result(timeout=PATIENCE).text))
    thread.start()
    wait_until(lambda: subscriptions(client) == 1)
    pipeline = worker.redis.pipeline()  # no message reaches the client
    pipeline.client_kill_filter(_type="pubsub")
    pipeline.execute()
    worker.finish(job.id, "whole")
    thread.join()
    assert found == ["whole"]


def test_a_connection_on_which_redis_is_silent_is_given_up(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "SILENCE_SECONDS", 1000.0)
    monkeypatch.setattr(live, "PING_SECONDS", 0.02)
    job = client.submit(REQUEST)
    worker.start(job.id)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(job.result(timeout=PATIENCE).text))
    thread.start()
    wait_until(lambda: subscriptions(client) == 1)
    (first,) = client.redis.client_list(_type="pubsub")

    looks = itertools.count()

    def another() -> bool:
        if next(looks) % 20 == 0:
            client.redis.client_pause(500)  # a ping that comes meanwhile has its reply afterwards
        return any(one["id"] != first["id"] for one in client.redis.client_list(_type="pubsub"))

    wait_until(another)
    monkeypatch.setattr(live, "PING_SECONDS", 1000.0)
    wait_until(lambda: subscriptions(client) == 1)
    worker.finish(job.id, "whole")
    thread.join()
    assert found == ["whole"]


def test_a_slow_follower_misses_messages_but_no_text(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "INBOX", 3)
    monkeypatch.setattr(follow, "SILENCE_SECONDS", 1000.0)
    job = client.submit(REQUEST)
    worker.start(job.id)
    worker.write(job.id, 1, 1, "1 ")
    chunks = job.stream()
    text = next(chunks).text
    worker.write(job.id, 1, 2, "2 ")
    text += next(chunks).text  # subscribed now
    for seq in range(3, 30):
        worker.write(job.id, 1, seq, f"{seq} ")
    whole = "".join(f"{seq} " for seq in range(1, 30))
    worker.finish(job.id, whole)
    assert text + "".join(chunk.text for chunk in chunks) == whole


def test_a_forked_process_has_a_connection_of_its_own(
    client: Client, worker: StepwiseWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "IDLE_SECONDS", 1000.0)
    job = client.submit(REQUEST)
    worker.start(job.id)
    with suppress(JobError):
        job.result(timeout=0.05)  # starts the thread
    wait_until(lambda: subscriptions(client) == 0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, job.result(timeout=PATIENCE).text.encode())
        finally:
            os._exit(0)
    os.close(write)
    wait_until(lambda: subscriptions(client) == 1)
    worker.finish(job.id, "forked")
    with open(read, encoding="utf-8") as pipe:
        assert pipe.read() == "forked"
    os.waitpid(child, 0)
