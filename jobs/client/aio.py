"""The API for asyncio: `Client` with `await` and `async for`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import redis.asyncio

from jobs.api.caller import run_in_thread
from jobs.api.params import SessionFields
from jobs.client.aio_session import AsyncSession
from jobs.client.chat_completions import AsyncChat
from jobs.client.client import Client
from jobs.client.job import AsyncJob, AsyncScoreJob, Q, R, for_asyncio, kept_requests
from jobs.client.run import AsyncRun
from jobs.client.wait_many import follow_ends, gather_outcomes, jobs_in, wait_for_rows
from jobs.errors import JobError
from jobs.store.connection.async_driver import AsyncConnection
from jobs.store.connection.connect import connect_async
from jobs.store.connection.protocol import iterate_async, run_async
from jobs.store.enqueue import ChatInput, RequestInput, ScoreInput
from jobs.store.sessions import needed_model, open_session


class AsyncClient:
    """Submits chat and scoring jobs and finds them again, without blocking the event loop.

    Arguments and errors are those of `Client`. Use one client per event loop.
    """

    def __init__(self, url: str | None = None, *, result_ttl: int | None = None) -> None:
        # Enqueueing blocks, so it runs in a thread.
        self._producer = Client(url, result_ttl=result_ttl)
        self.connection = AsyncConnection(connect_async(url))

    @cached_property
    def chat(self) -> AsyncChat:
        """`await client.chat.completions.create(...)`."""
        return AsyncChat(self.submit, self.connection)

    @property
    def redis(self) -> redis.asyncio.Redis:
        """The client of the package redis."""
        client: redis.asyncio.Redis = self.connection.redis
        return client

    @overload
    async def submit(self, request: ScoreInput, *, durable: bool = False) -> AsyncScoreJob: ...
    @overload
    async def submit(self, request: ChatInput, *, durable: bool = False) -> AsyncJob: ...
    async def submit(self, request: RequestInput, *, durable: bool = False) -> AsyncJob[Any, Any]:
        """Enqueue one request. When this returns, the job is in Redis, see `Client.submit`."""
        submit: Any = partial(self._producer.submit, durable=durable)
        job = await run_in_thread(submit, request)
        return for_asyncio(job, self.connection)

    @overload
    async def submit_many(
        self, requests: Iterable[ScoreInput], *, durable: bool = False
    ) -> list[AsyncScoreJob]: ...
    @overload
    async def submit_many(
        self, requests: Iterable[ChatInput], *, durable: bool = False
    ) -> list[AsyncJob]: ...
    async def submit_many(
        self, requests: Iterable[RequestInput], *, durable: bool = False
    ) -> list[Any]:
        """Enqueue many requests in few round trips, see `Client.submit_many`."""
        submit: Any = partial(self._producer.submit_many, durable=durable)
        jobs = await run_in_thread(submit, requests)
        return [for_asyncio(job, self.connection) for job in jobs]

    def job(self, job_id: str) -> AsyncJob:
        """The handle to a job, by its id, whoever submitted it. Sends nothing to Redis."""
        return AsyncJob(self.connection, job_id)

    def run(self, run_id: str, results: str | os.PathLike[str] | None = None) -> AsyncRun:
        """The handle to a run, see `Client.run`. Sends nothing to Redis."""
        return AsyncRun(self.connection, run_id, results)

    async def session(
        self,
        id: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        ttl: int | None = None,
        **fields: Unpack[SessionFields],
    ) -> AsyncSession:
        """Open a conversation, see `Client.session`."""
        steps = open_session(id, needed_model(id, model), system, ttl, dict(fields))
        state = await run_async(steps, self.connection)
        return AsyncSession(self.submit, self.connection, state)

    async def as_completed(
        self, jobs: Iterable[AsyncJob[R, Q]], timeout: float | None = None
    ) -> AsyncIterator[AsyncJob[R, Q]]:
        """The jobs as they end, see `Client.as_completed`."""
        by_id: dict[str, AsyncJob[R, Q]] = {job.id: job for job in jobs_in(jobs, AsyncJob)}
        async for job_id in iterate_async(follow_ends(by_id, timeout), self.connection):
            yield by_id[job_id]

    @overload
    async def gather(
        self,
        *jobs: AsyncJob[R, Q] | Iterable[AsyncJob[R, Q]],
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...
    @overload
    async def gather(
        self,
        *jobs: AsyncJob[R, Q] | Iterable[AsyncJob[R, Q]],
        timeout: float | None = None,
        return_exceptions: bool,
    ) -> list[R | JobError]: ...
    async def gather(
        self,
        *jobs: AsyncJob[Any, Any] | Iterable[AsyncJob[Any, Any]],
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """The results of all jobs in the order of the arguments, see `Client.gather`."""
        ids = [job.id for job in jobs_in(jobs, AsyncJob)]
        return await run_async(gather_outcomes(ids, timeout, return_exceptions), self.connection)

    async def wait_for_rows(
        self, jobs: Iterable[AsyncJob[Any, Any]], timeout: float | None = None
    ) -> None:
        """Wait until the rows of all jobs are in Parquet, see `Client.wait_for_rows`."""
        requests = kept_requests(jobs_in(jobs, AsyncJob))
        await run_async(wait_for_rows(requests, timeout), self.connection)

    async def close(self) -> None:
        await self.connection.close()
        self._producer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
