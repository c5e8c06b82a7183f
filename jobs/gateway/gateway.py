"""`Gateway`: what all routes of one process share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jobs.client.aio import AsyncClient
from jobs.client.job import AsyncJob
from jobs.errors import JobError
from jobs.gateway.bodies import HandsOn
from jobs.gateway.failures import SHOWN, HttpError
from jobs.gateway.figures import Figures
from jobs.gateway.overview import Overview
from jobs.gateway.redis_waits import in_time, read_soon
from jobs.gateway.served import ServedModels
from jobs.gateway.settings import Settings
from jobs.gateway.tenants import ApiKeys, Tenant
from jobs.gateway.tokenizers import Tokenizers
from jobs.keys import JOB_ID
from jobs.store.job_state import JobState, Status, read_state
from jobs.store.results_folder import read_id, record_as_steps

logger = logging.getLogger(__name__)

NAMES = ("id", "row", "custom_id")  # in `job`: the same request gives the same job


class Gateway:
    """One client of Redis, with one subscription; the keys; the models that are served. Keeps no
    state of a job: any process on the same Redis can go on with its streams.

    large: answers requests with large bodies; None: this process does.
    stopping: the process has been told to end. The jobs of the connections that it closes go on.
    """

    def __init__(
        self, settings: Settings, client: AsyncClient, large: HandsOn | None = None
    ) -> None:
        self.settings = settings
        self.large = large
        self.client = client
        self.keys = ApiKeys(settings.api_key_file)
        self.models = ServedModels(client.connection)
        self.tokenizers = Tokenizers(client.connection)
        self.figures = Figures()
        self.overview = Overview(settings)
        self.stopping = False
        self._late = set[asyncio.Task[Any]]()  # that a reply has not waited for

    async def close(self) -> None:
        """Close the connections to Redis."""
        self.overview.close()
        await self.client.close()

    async def job_of(self, tenant: Tenant, job_id: str) -> tuple[AsyncJob, JobState]:
        """A job of a tenant, and its state. Raises HttpError 404 for those of others as well."""
        if JOB_ID.fullmatch(job_id):
            state = await read_soon(
                lambda deadline: read_state(job_id, full=True, deadline=deadline),
                self.client.connection,
            )
            if state.status is not Status.UNKNOWN and tenant.owns(state.request):
                return self.client.job(job_id), state
        raise HttpError(
            404,
            f"no job {job_id[:SHOWN]!r}: it was never submitted, or its result has expired",
            "not_found",
            "id",
        )

    async def submit(self, tenant: Tenant, body: Mapping[str, Any]) -> AsyncJob:
        """Enqueue a chat completion for a tenant. Raises HttpError and JobError."""
        (job,) = await self.submit_many(tenant, [body])
        return job

    async def submit_many(
        self, tenant: Tenant, bodies: Sequence[Mapping[str, Any]]
    ) -> list[AsyncJob]:
        """Enqueue chat completions for a tenant, all or none. Raises HttpError and JobError."""
        requests = [tenant.claim(body) for body in bodies]
        await self.models.require(requests[0].get("model"))
        return await self._enqueue(requests)

    async def check_results(self) -> None:
        """Raises HttpError unless the results folder is that of the workers, if there are any."""
        root = self.settings.results
        record = await read_soon(record_as_steps, self.client.connection)
        if record is None or record.id == await asyncio.to_thread(read_id, root):
            return
        logger.error(
            "%s is not the results folder of the workers on this Redis, which is %s on %s: select "
            "that folder with --results DIR, on a disk that this machine shares",
            root.absolute(),
            record.path,
            record.host,
        )
        raise HttpError(
            500,
            "the gateway has another results folder than the workers, and keeps no files there: "
            "its log has both",
            "internal",
            headers={"x-should-retry": "false"},
        )

    async def _enqueue(self, requests: list[dict[str, Any]]) -> list[AsyncJob]:
        """The jobs of requests. If Redis hangs, the submit goes on in its thread after the reply,
        and its jobs are withdrawn when they are in Redis."""
        submit: Any = self.client.submit_many  # checks the requests
        submitting: asyncio.Task[list[AsyncJob]] = asyncio.create_task(submit(requests))
        try:
            return await in_time(asyncio.shield(submitting))
        except JobError:
            if not submitting.done():
                late = asyncio.create_task(self._withdraw(submitting, requests))
                self._late.add(late)
                late.add_done_callback(self._late.discard)
            raise

    async def _withdraw(
        self, submitting: asyncio.Task[list[AsyncJob]], requests: list[dict[str, Any]]
    ) -> None:
        """Cancel jobs whose client was told that there are none. Those that it has named stay: it
        may have sent them again."""
        with suppress(JobError):
            for job, request in zip(await submitting, requests, strict=True):
                if not any((request.get("job") or {}).get(name) is not None for name in NAMES):
                    await self.cancel(job)

    async def cancel(self, job: AsyncJob[Any, Any]) -> None:
        """Its client has gone. A process that is stopping has closed the connection itself."""
        if not self.stopping:
            with suppress(JobError):
                await job.cancel()
