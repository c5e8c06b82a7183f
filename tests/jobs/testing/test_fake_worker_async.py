"""FakeWorker with AsyncClient."""

from __future__ import annotations

import asyncio
import math

import pytest

from jobs import JobError
from jobs.api.params import RequestFields
from jobs.store.job_state import Status
from jobs.testing import Answer, FakeWorker
from tests.waiting import PATIENCE

REQUEST: RequestFields = {"model": "any", "messages": [{"role": "user", "content": "one two"}]}


def test_a_stream_and_a_result() -> None:
    async def main() -> None:
        worker = FakeWorker("Hello big world")
        async with worker.async_client() as client:
            job = await client.submit(REQUEST)
            assert await job.status() is Status.QUEUED
            assert [chunk.text async for chunk in job.stream()] == ["Hello ", "big ", "world"]
            assert (await job.result(timeout=PATIENCE)).text == "Hello big world"
            assert await job.status() is Status.FINISHED

    asyncio.run(main())


def test_many_results_are_gathered() -> None:
    async def main() -> None:
        worker = FakeWorker(lambda request: request.messages[0].text)
        requests: list[RequestFields] = [
            {**REQUEST, "messages": [{"role": "user", "content": str(number)}]}
            for number in range(20)
        ]
        async with worker.async_client() as client:
            jobs = await client.submit_many(requests)
            answers = await asyncio.gather(*[job.result(timeout=PATIENCE) for job in jobs])
        assert [answer.text for answer in answers] == [str(number) for number in range(20)]

    asyncio.run(main())


def test_a_job_is_cancelled_in_the_middle_of_its_stream() -> None:
    async def main() -> None:
        async with FakeWorker("one two three").async_client() as client:
            job = await client.submit(REQUEST)
            received = []
            with pytest.raises(JobError, match="cancelled"):
                async for chunk in job.stream():
                    received.append(chunk.text)
                    assert await job.cancel()
            assert received == ["one "]

    asyncio.run(main())


def test_waiting_does_not_block_the_event_loop() -> None:
    async def main() -> None:
        async with FakeWorker(Answer(delay=math.inf)).async_client() as client:
            job = await client.submit(REQUEST)
            waiting = asyncio.create_task(job.result(timeout=PATIENCE))
            while await job.status() is not Status.STARTED:
                pass
            assert await job.cancel()
            with pytest.raises(JobError, match="cancelled"):
                await waiting

    asyncio.run(main())
