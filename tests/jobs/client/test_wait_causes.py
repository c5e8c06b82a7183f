"""Waits whose time has passed say what their job waits for, whatever warnings are shown."""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jobs import AsyncClient, Client, WaitTimeout
from jobs.errors import InvalidRequest
from tests.jobs.conftest import StepwiseWorker, publish_worker

MESSAGES: Any = [{"role": "user", "content": "hi"}]
NOBODY = (
    "no worker serves 'demoo' (models served now: demo, other; chatjobs work --model demoo starts "
    "one)"
)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """As in a service that filters them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def request(**fields: Any) -> Any:
    return {"model": "demoo", "messages": MESSAGES, **fields}


def rows(client: Client) -> None:
    client.wait_for_rows([client.submit(request())], timeout=0.05)


WAITS: dict[str, Callable[[Client], Any]] = {
    "result": lambda client: client.submit(request()).result(timeout=0.05),
    "stream": lambda client: list(client.submit(request()).stream(timeout=0.05)),
    "gather": lambda client: client.gather(client.submit(request()), timeout=0.05),
    "as_completed": lambda client: list(client.as_completed([client.submit(request())], 0.05)),
    "wait_for_rows": rows,
    "create": lambda client: client.chat.completions.create(**request(), timeout=0.05),
    "create stream": lambda client: list(
        client.chat.completions.create(**request(), timeout=0.05, stream=True)
    ),
    "send": lambda client: client.session(model="demoo").send("hi", timeout=0.05),
    "session stream": lambda client: list(client.session(model="demoo").stream("hi", timeout=0.05)),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_for_a_model_that_nobody_serves_names_it_and_those_that_are_served(
    client: Client, wait: Callable[[Client], Any]
) -> None:
    publish_worker(client, "other", "demo")
    with pytest.raises(WaitTimeout) as caught:
        wait(client)
    assert f"(status: queued): {NOBODY}; it is" in caught.value.message


def test_an_async_wait_names_it_as_well(client: Client, redis_url: str) -> None:
    publish_worker(client, "other", "demo")

    async def wait() -> list[str]:
        async with AsyncClient(redis_url) as aclient:
            job = await aclient.submit(request())
            session = await aclient.session(model="demoo")
            messages = []
            with pytest.raises(WaitTimeout) as caught:
                await job.result(timeout=0.05)
            messages.append(caught.value.message)
            for stream in (job.stream(timeout=0.05), session.stream("hi", timeout=0.05)):
                with pytest.raises(WaitTimeout) as caught:
                    [chunk async for chunk in stream]
                messages.append(caught.value.message)
            return messages

    for message in asyncio.run(wait()):
        assert NOBODY in message


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"job": {"delay": 3600}}, r"\(status: scheduled\): it is scheduled for \d{4}-"),
        ({"job": {}}, r"\(status: queued\): it is queued behind 1 other job for 'demo'"),
        (
            {"job": {"tenant": "t"}},
            r"\(status: queued\): it is the next one of tenant 't' for 'demo'",
        ),
    ],
)
def test_other_causes_are_named(client: Client, fields: Any, cause: str) -> None:
    publish_worker(client, "demo")
    client.submit(request(model="demo"))
    job = client.submit(request(model="demo", **fields))
    for wait in (job.result, lambda timeout: next(job.stream(timeout=timeout))):
        with pytest.raises(WaitTimeout, match=cause):
            wait(timeout=0.05)


def test_a_turn_that_waits_names_the_turns_before_it(client: Client) -> None:
    session = client.session("s", model="demo")
    session.submit("a")
    with pytest.raises(WaitTimeout, match="it waits for 1 other turn of session 's'"):
        session.submit("b", wait=True).result(timeout=0.05)


def test_each_output_gives_a_stream_its_time_again(client: Client, worker: StepwiseWorker) -> None:
    """Also one that repeats what the reader has. The job goes on after the time has passed."""
    job = client.submit(request())
    worker.start(job.id)
    worker.write(job.id, 1, 1, "a")
    stream = job.stream(timeout=0.05)
    assert next(stream).text == "a"
    with pytest.raises(WaitTimeout, match=rf"no chunk of job {job.id} for 0\.05 s \(status: star"):
        next(stream)
    assert job.status() == "started"
    worker.finish(job.id, "ab")
    assert "".join(chunk.text for chunk in job.stream(timeout=0)) == "ab"


@pytest.mark.parametrize("timeout", ["5", True, math.nan, [5]])
def test_what_is_no_time_is_refused_before_a_turn_is_submitted(
    client: Client, timeout: Any
) -> None:
    session = client.session(model="demo")
    job = client.submit(request())
    for stream in (session.stream("hi", timeout=timeout), job.stream(timeout=timeout)):
        with pytest.raises(InvalidRequest, match="timeout: a number of seconds"):
            next(stream)
    session.submit("hi")  # which is the first turn
