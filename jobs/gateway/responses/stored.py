"""The responses that a tenant has stored: each is its job, and what Redis keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs.client.job import AsyncJob
from jobs.errors import JobError, invalid
from jobs.gateway.failures import SHOWN, HttpError
from jobs.gateway.gateway import Gateway
from jobs.gateway.redis_waits import in_time
from jobs.gateway.responses.answers import ended, finished
from jobs.gateway.responses.asked import Asked, job_of_response
from jobs.gateway.tenants import Tenant
from jobs.operations import CHAT
from jobs.store.connection.protocol import run_async
from jobs.store.job_state import JobState, Status
from jobs.store.purge import purge
from jobs.store.responses import TooMany, forget_response, keep_response, read_response

STOP_SECONDS = 10.0  # for a job that was cancelled; its worker ends it soon


@dataclass(frozen=True, slots=True)
class Found:
    """A stored response, and its job at one moment. `owner`: its tenant; empty without keys."""

    owner: str
    asked: Asked
    job: AsyncJob
    state: JobState


class StoredResponses:
    """Finds, makes and deletes them. All methods raise HttpError and JobError."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def submit(self, tenant: Tenant, asked: Asked) -> tuple[Asked, AsyncJob]:
        """Enqueue the job of a request. The response is stored before it, if it should be: one with
        the same `job.id` that is stored already stays as it is."""
        messages = await self._earlier(tenant, asked.response["previous_response_id"])
        chat = asked.after(messages)
        if not asked.response["store"]:
            return asked, await self._gateway.submit(tenant, chat)
        owner = tenant.name or ""
        found = await self._run(
            keep_response(
                asked.job_id, owner, asked.content(), asked.kept_seconds, tenant.responses
            )
        )
        if isinstance(found, TooMany):
            raise HttpError(
                429,
                f"tenant {tenant.name!r} has {found.stored} stored responses, and its limit is "
                f"{tenant.responses}: delete some, wait until some expire, or set store: false",
                "insufficient_quota",
                kind="insufficient_quota",
                headers={"x-should-retry": "false"},
            )
        if found is not None:
            if found.tenant != owner:
                raise invalid(f"job.id: {asked.job_id} is the id of another request", "job.id")
            stored = Asked.stored(asked.job_id, found.content)
            return stored, await self._gateway.submit(tenant, chat)
        try:
            return asked, await self._gateway.submit(tenant, chat)
        except (HttpError, JobError):
            with suppress(JobError):
                await self._run(forget_response(asked.job_id, owner))
            raise

    async def find(self, tenant: Tenant, id: str) -> Found:
        """A response by its id. HttpError 404 for those of others as well."""
        job_id = job_of_response(id)
        stored = None if job_id is None else await self._run(read_response(job_id))
        if job_id is None or stored is None or tenant.name not in (None, stored.tenant):
            raise _unknown(id)
        try:
            job, state = await self._gateway.job_of(tenant, job_id)
        except HttpError:
            raise _unknown(id) from None
        if state.func != CHAT.func:
            raise _unknown(id)
        return Found(stored.tenant, Asked.stored(job_id, stored.content), job, state)

    async def now(self, found: Found) -> dict[str, Any]:
        """The response as it is now."""
        status = found.state.status
        if not status.over:
            running = status is Status.STARTED or not found.asked.response["background"]
            return {**found.asked.response, "status": "in_progress" if running else "queued"}
        try:
            return finished(found.asked, await in_time(found.job.result()))
        except JobError as error:
            if status is Status.FINISHED:
                raise
            return ended(found.asked, error)

    async def cancel(self, tenant: Tenant, found: Found) -> Found:
        """Cancel its job, and wait until it has ended."""
        if not await in_time(found.job.cancel()):
            return await self.find(tenant, found.asked.response["id"])
        with suppress(JobError):
            await found.job.result(STOP_SECONDS)
        return await self.find(tenant, found.asked.response["id"])

    async def delete(self, tenant: Tenant, found: Found) -> None:
        """Delete it and its job, which is cancelled first. The row of the job stays."""
        if not found.state.status.over:
            found = await self.cancel(tenant, found)
        await self._run(forget_response(found.job.id, found.owner))
        with suppress(JobError):  # it may have expired meanwhile
            await self._run(purge(found.job.id))

    async def _earlier(self, tenant: Tenant, id: str | None) -> list[Mapping[str, Any]]:
        """The messages of the conversation up to a response, without its instructions."""
        if id is None:
            return []
        name = "previous_response_id"
        try:
            found = await self.find(tenant, id)
        except HttpError as error:
            message = str(error)
            raise HttpError(400, message, "previous_response_not_found", name) from None
        if not found.state.status.over:
            raise invalid(f"{name}: {id} has no answer yet: wait until it is completed", name)
        try:
            answer = (await in_time(found.job.result())).choices[0].message.to_dict()
        except JobError as error:
            if error.code == "unavailable":
                raise
            reason = f"{id} has no answer to go on from: {error.message}"
            raise invalid(f"{name}: {reason}", name) from None
        first = 0 if found.asked.response["instructions"] is None else 1
        answer.setdefault("content", None)
        return [*found.state.request["messages"][first:], answer]

    async def _run(self, steps: Any) -> Any:
        return await in_time(run_async(steps, self._gateway.client.connection))


def _unknown(id: str) -> HttpError:
    return HttpError(
        404,
        f"no response {id[:SHOWN]!r}: it was never stored, it was deleted, or it has expired",
        "not_found",
        "id",
    )
