"""/v1/chat/completions: one job for each request.

The `id:` of each event is <job>:<cursor>. A client that sends the last one as Last-Event-ID, with
the same POST or to the route of the job's stream, gets the rest from the replay log. A chunk that
is sent as two events has the id of the one before it, and HALF, on the first of them.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.answer import ChatCompletion, completion_id
from jobs.api.chunk import ChatChunk
from jobs.api.wire import describe
from jobs.client.job import AsyncJob
from jobs.encoding import to_json
from jobs.errors import JobError, invalid
from jobs.gateway.bodies import read_json
from jobs.gateway.endpoints import Gone, route, set_request_id
from jobs.gateway.events import DONE, EventStream, event, nothing
from jobs.gateway.failures import JsonReply, failed
from jobs.gateway.gateway import Gateway
from jobs.gateway.leaving import ClientLeft, until_left
from jobs.gateway.loops import keep_via
from jobs.gateway.options import take_background, wants_usage
from jobs.gateway.tenants import Tenant
from jobs.operations import CHAT

PATH = "/v1/chat/completions"
EVENT_ID = re.compile(r"(?:([A-Za-z0-9_-]{1,200}):)?([0-9]{1,19}-[0-9]{1,19}\+?)")
START, HALF = "0-0", "+"
PREFIX = completion_id("x").removesuffix("x")


def routes(gateway: Gateway) -> list[Route]:
    chat = _Chat(gateway)
    return [
        route(gateway, "POST", PATH, chat.create),
        route(gateway, "GET", PATH + "/{id}", chat.get),
        route(gateway, "GET", PATH + "/{id}/stream", chat.follow),
    ]


class _Chat:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Submit a job and reply with its answer, or go on with the stream of Last-Event-ID."""
        settings = self._gateway.settings
        body = await read_json(request, settings.max_body, settings.read_seconds)
        background = take_background(body)
        stream = body.get("stream")
        if (job_and_cursor := last_event(request)) and stream is True:
            job_id, cursor = job_and_cursor
            return await self._resume(request, tenant, job_id, cursor, background)
        if stream is None:
            body["stream"] = False  # nobody follows
        keep_via(request, body)
        job = await self._gateway.submit(tenant, body)
        set_request_id(request, job.id)
        if stream is True:
            return self._events(job, body, None, background)
        try:
            completion = await until_left(request.receive, job.result())
        except ClientLeft:
            if not background:
                await self._gateway.cancel(job)
            return Gone()
        except JobError as error:
            raise failed(error) from None
        return JsonReply(completion_dict(completion))

    async def get(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Wait for the answer of a job. A client that goes away leaves it alone."""
        job, _ = await self._find(tenant, request.path_params["id"])
        set_request_id(request, job.id)
        try:
            completion = await until_left(request.receive, job.result())
        except ClientLeft:
            return Gone()
        except JobError as error:
            raise failed(error) from None
        return JsonReply(completion_dict(completion))

    async def follow(self, request: Request, tenant: Tenant) -> ASGIApp:
        """Stream the answer of a job from its start, or after Last-Event-ID. A client that goes
        away leaves the job alone."""
        found = last_event(request)
        return await self._resume(
            request, tenant, request.path_params["id"], found and found[1], True
        )

    async def _resume(
        self, request: Request, tenant: Tenant, job_id: str, after: str | None, background: bool
    ) -> ASGIApp:
        job, submitted = await self._find(tenant, job_id)
        set_request_id(request, job.id)
        return self._events(job, submitted, after, background)

    async def _find(self, tenant: Tenant, id: str) -> tuple[AsyncJob, Mapping[str, Any]]:
        job, state = await self._gateway.job_of(tenant, id.removeprefix(PREFIX))
        if state.func != CHAT.func:
            raise invalid(f"job {job.id} is no chat completion", "id")
        return job, state.request

    def _events(
        self, job: AsyncJob, body: Mapping[str, Any], after: str | None, background: bool
    ) -> EventStream:
        async def leave() -> None:
            await self._gateway.cancel(job)

        chunks = job.stream(after and after.removesuffix(HALF))
        return EventStream(
            _encoded(job.id, chunks, wants_usage(body), after or START),
            self._gateway.settings.ping_seconds,
            nothing if background else leave,
        )


async def _encoded(
    job_id: str, chunks: AsyncIterator[ChatChunk], usage: bool, after: str
) -> AsyncIterator[bytes]:
    """`after`: the id of the last event that the client has seen, without the job."""
    cursor, skips = after.removesuffix(HALF), after.endswith(HALF)
    async for chunk in chunks:
        first, last = _split(chunk_dict(chunk, usage))
        if first is not None and not skips:
            yield event(to_json(first), f"{job_id}:{cursor}{HALF}")
        cursor, skips = chunk.cursor or cursor, False
        yield event(to_json(last), f"{job_id}:{cursor}")
    yield DONE


def _split(content: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """A chunk as one or two: OpenAI sends the end of a choice after its calls, and the events of
    its client rely on that."""
    choices = content["choices"]
    if not any(one["finish_reason"] and "tool_calls" in one["delta"] for one in choices):
        return None, content
    calls = [{**one, "finish_reason": None} for one in choices]
    ends = [
        {"index": one["index"], "delta": {}, "finish_reason": reason, "logprobs": None}
        for one in choices
        if (reason := one["finish_reason"])
    ]
    rest = {name: value for name, value in content.items() if name != "prompt_token_ids"}
    return {**content, "choices": calls}, {**rest, "choices": ends}


def chunk_dict(chunk: ChatChunk, usage: bool) -> dict[str, Any]:
    """A chunk as OpenAI sends it. `usage`: the client has asked for it."""
    content = chunk.to_dict()
    content.pop("cursor", None)
    if usage:
        content.setdefault("usage", None)
    for choice in content["choices"]:
        choice.setdefault("logprobs", None)
    return content


def completion_dict(completion: ChatCompletion) -> dict[str, Any]:
    """An answer as OpenAI sends it."""
    content = completion.to_dict()
    for choice in content["choices"]:
        choice.setdefault("logprobs", None)
        choice["message"].setdefault("refusal", None)
    return content


def last_event(request: Request) -> tuple[str, str] | None:
    """The job and the rest of the header Last-Event-ID; the job may be empty where the path has
    it. Raises InvalidRequest."""
    value = request.headers.get("last-event-id")
    if not value:
        return None
    found = EVENT_ID.fullmatch(value)
    if found is None or (found[1] is None and "id" not in request.path_params):
        raise invalid(
            "Last-Event-ID: an event has the id <job>:<attempt>-<seq>, got "
            f"{describe(value)}: send that of the last event",
            "Last-Event-ID",
        )
    return found[1] or "", found[2]
