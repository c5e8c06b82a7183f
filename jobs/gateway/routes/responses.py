"""/v1/responses: OpenAI's Responses API. A response is a chat completion in another form.

The `id:` of each event is its sequence number. A client that sends the last one as Last-Event-ID,
or as `starting_after`, to the route of the response gets the events after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.wire import describe
from jobs.client.job import AsyncJob
from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.gateway.bodies import read_json
from jobs.gateway.endpoints import Gone, route, set_request_id
from jobs.gateway.events import EventStream, event, nothing
from jobs.gateway.failures import JsonReply, failed
from jobs.gateway.gateway import Gateway
from jobs.gateway.leaving import ClientLeft, until_left
from jobs.gateway.loops import keep_via
from jobs.gateway.paging import natural, read_number, reads_newest_first
from jobs.gateway.responses.answers import finished
from jobs.gateway.responses.asked import Asked, renamed
from jobs.gateway.responses.events import Event, Events
from jobs.gateway.responses.stored import StoredResponses
from jobs.gateway.tenants import Tenant
from jobs.store.job_state import Status

PATH = "/v1/responses"
MOST_ITEMS, DEFAULT_ITEMS = 100, 20  # of a page of input items


def routes(gateway: Gateway) -> list[Route]:
    responses = _Responses(gateway)
    return [
        route(gateway, "POST", PATH, responses.create),
        route(gateway, "GET", PATH + "/{id}", responses.get),
        route(gateway, "DELETE", PATH + "/{id}", responses.delete),
        route(gateway, "POST", PATH + "/{id}/cancel", responses.cancel),
        route(gateway, "GET", PATH + "/{id}/input_items", responses.input_items),
    ]


class _Responses:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stored = StoredResponses(gateway)

    async def create(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Submit a job and reply with its answer, its events or, in the background, at once."""
        settings = self._gateway.settings
        body = await read_json(request, settings.max_body, settings.read_seconds)
        keep_via(request, body)
        asked = await asyncio.to_thread(Asked.read, body)  # of an input that may be long
        try:
            asked, job = await self._stored.submit(tenant, asked)
        except JobError as error:
            raise renamed(error) from None
        set_request_id(request, job.id)
        background = asked.response["background"]
        if body.get("stream") is True:
            return self._events(asked, job, -1, background)
        if background:
            return JsonReply(asked.response)
        try:
            completion = await until_left(request.receive, job.result())
        except ClientLeft:
            await self._gateway.cancel(job)
            return Gone()
        except JobError as error:
            raise failed(renamed(error)) from None
        return JsonReply(finished(asked, completion))

    async def get(self, request: Request, tenant: Tenant) -> ASGIApp:
        """A response as it is now, or its events. A client that goes away leaves it alone."""
        found = await self._stored.find(tenant, request.path_params["id"])
        set_request_id(request, found.job.id)
        if _streams(request):
            return self._events(found.asked, found.job, _last_number(request), True)
        return JsonReply(await self._stored.now(found))

    async def delete(self, request: Request, tenant: Tenant) -> ASGIApp:
        found = await self._stored.find(tenant, request.path_params["id"])
        await self._stored.delete(tenant, found)
        return JsonReply({"id": found.asked.response["id"], "object": "response", "deleted": True})

    async def cancel(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Stop a response; one that has ended stays as it is."""
        found = await self._stored.find(tenant, request.path_params["id"])
        found = await self._stored.cancel(tenant, found)
        return JsonReply(await self._stored.now(found))

    async def input_items(self, request: Request, tenant: Tenant) -> ASGIApp:
        """The items of a response's own input, the last one first."""
        found = await self._stored.find(tenant, request.path_params["id"])
        items = list(found.asked.items)
        if reads_newest_first(request):
            items.reverse()
        limit = read_number(request, "limit", 1, MOST_ITEMS, DEFAULT_ITEMS)
        after = request.query_params.get("after")
        first = 0
        if after is not None:
            first = next((n for n, item in enumerate(items, 1) if item["id"] == after), -1)
            if first < 0:
                raise invalid(f"after: no item has the id {describe(after)}", "after")
        page = items[first : first + limit]
        return JsonReply(
            {
                "object": "list",
                "data": page,
                "first_id": page[0]["id"] if page else "",
                "last_id": page[-1]["id"] if page else "",
                "has_more": len(items) > first + limit,
            }
        )

    def _events(self, asked: Asked, job: AsyncJob, after: int, background: bool) -> EventStream:
        """The events with numbers above `after`."""

        async def leave() -> None:
            await self._gateway.cancel(job)

        return EventStream(
            _encoded(asked, job, after),
            self._gateway.settings.ping_seconds,
            nothing if background else leave,
        )


async def _encoded(asked: Asked, job: AsyncJob, after: int) -> AsyncIterator[bytes]:
    events = Events(asked)

    def encode(some: list[Event]) -> bytes:
        return b"".join(
            event(to_json(one), str(one["sequence_number"]), one["type"])
            for one in some
            if one["sequence_number"] > after
        )

    if new := encode(events.begin()):
        yield new
    try:
        async for chunk in job.stream():
            for choice in chunk.choices:
                delta = choice.delta
                if new := encode(events.add(delta.reasoning_content or "", delta.content or "")):
                    yield new
        yield encode(events.end(await job.result()))
    except JobError as error:
        if await _has_ended(job):
            yield encode(events.fail(error))
        else:
            yield event(to_json(events.interrupt(error)), name="error")


async def _has_ended(job: AsyncJob) -> bool:
    """True if a job has ended without an answer."""
    try:
        return await job.status() in (Status.FAILED, Status.CANCELLED)
    except JobError:
        return False


def _streams(request: Request) -> bool:
    value = request.query_params.get("stream", "false")
    if value not in ("true", "false"):
        raise invalid(f"stream: expected true or false, got {describe(value)}", "stream")
    return value == "true"


def _last_number(request: Request) -> int:
    """Number of the last event that a client has seen; -1 if it has seen none."""
    number = read_number(request, "starting_after", 0, 2**53, -1)
    header = request.headers.get("last-event-id")
    if not header:
        return number
    seen = natural(header)
    if seen is None:
        raise invalid(
            f"Last-Event-ID: an event of a response has a number, got {describe(header)}: send "
            "that of the last event",
            "Last-Event-ID",
        )
    return max(number, seen)
