"""/v1/completions: one job for each prompt, without the chat template.

With `echo` and `logprobs` it scores prompts, as lm-evaluation-harness asks for: the worker gives
the log-probabilities of their tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.answer import Usage
from jobs.api.chunk import ChatChunk, ChunkChoice
from jobs.client.job import AsyncJob
from jobs.encoding import to_json
from jobs.errors import InvalidRequest, JobError
from jobs.gateway.bodies import read_json
from jobs.gateway.completions.answers import Logprobs, head, reply, usage_of
from jobs.gateway.completions.asked import Call, Echo, about_prompt
from jobs.gateway.endpoints import Gone, route, set_request_id
from jobs.gateway.events import DONE, EventStream, event, nothing
from jobs.gateway.failures import JsonReply, failed
from jobs.gateway.gateway import Gateway
from jobs.gateway.leaving import ClientLeft, end, until_left
from jobs.gateway.options import take_background
from jobs.gateway.tenants import Tenant

PATH = "/v1/completions"


def routes(gateway: Gateway) -> list[Route]:
    return [route(gateway, "POST", PATH, _Completions(gateway).create)]


class _Completions:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request, tenant: Tenant) -> ASGIApp:
        settings = self._gateway.settings
        body = await read_json(request, settings.max_body, settings.read_seconds)
        background = take_background(body)
        call = Call.read(body)
        if call.echo:
            call = replace(call, echoes=await self._echoes(call))
        try:
            jobs = await self._gateway.submit_many(tenant, call.jobs())
        except InvalidRequest as error:
            raise about_prompt(error) from None
        set_request_id(request, jobs[0].id)

        async def cancel() -> None:
            await asyncio.gather(*map(self._gateway.cancel, jobs))

        if call.stream:
            source = _events(call, jobs)
            return EventStream(source, settings.ping_seconds, nothing if background else cancel)
        try:
            completions = await until_left(request.receive, self._gateway.client.gather(jobs))
        except ClientLeft:
            if not background:
                await cancel()
            return Gone()
        except JobError as error:
            await cancel()  # one reply for all of them
            raise failed(about_prompt(error)) from None
        return JsonReply(reply(call, jobs[0].id, completions))

    async def _echoes(self, call: Call) -> list[Echo]:
        tokenizers, tokenizer = self._gateway.tokenizers, None
        if not all(isinstance(prompt, str) for prompt in call.prompts):
            model = (await self._gateway.models.models()).get(call.model)
            if model is not None and model.tokenizer is not None:
                tokenizer = await tokenizers.of(model)
        return await tokenizers.run(lambda: [Echo.of(one, tokenizer) for one in call.prompts])


async def _events(call: Call, jobs: Sequence[AsyncJob]) -> AsyncIterator[bytes]:
    """The streams of all jobs, as they come."""
    usages: list[Usage | None] = []
    beginning: dict[str, Any] = {}
    deltas = _Deltas(call)
    async with aclosing(_merged(jobs)) as chunks:
        async for number, chunk in chunks:
            beginning = head(jobs[0].id, chunk.created, call.model)
            if chunk.usage is not None:
                usages.append(chunk.usage)
            if chunk.choices:
                content = {**beginning, "choices": deltas.of(number, chunk)}
                yield event(to_json(content | ({"usage": None} if call.usage else {})))
    if call.usage:
        yield event(to_json({**beginning, "choices": [], "usage": usage_of(call, usages)}))
    yield DONE


class _Deltas:
    """The choices in the chunks of a stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._offsets: dict[int, int] = {}  # characters that each choice has had
        self._prompts: dict[int, list[int]] = {}  # token ids, by the number of the job
        self._told: set[int] = set()  # choices that have had those of their prompt

    def of(self, number: int, chunk: ChatChunk) -> list[dict[str, Any]]:
        """Those in a chunk of the job with this number."""
        if chunk.prompt_token_ids is not None:
            self._prompts[number] = chunk.prompt_token_ids
        return [self._delta(number, choice) for choice in chunk.choices]

    def _delta(self, number: int, choice: ChunkChoice) -> dict[str, Any]:
        call, offsets = self._call, self._offsets
        index = number * call.n + choice.index
        text = "" if call.scores_only else choice.delta.content or ""
        logprobs = None
        if call.logprobs is not None:
            tokens = Logprobs(offsets.get(index, 0))
            tokens.add(choice.logprobs.content or () if choice.logprobs is not None else ())
            offsets[index] = tokens.offset
            logprobs = tokens.to_dict()
        if call.echo and index not in offsets:
            text = call.echoes[number].text + text
        offsets.setdefault(index, 0)
        delta = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        return delta | (self._token_ids(number, index, choice) if call.token_ids else {})

    def _token_ids(self, number: int, index: int, choice: ChunkChoice) -> dict[str, Any]:
        """As vLLM has them: those of the prompt in the first chunk of each choice."""
        found: dict[str, Any] = {}
        if index not in self._told and number in self._prompts:
            self._told.add(index)
            found["prompt_token_ids"] = self._prompts[number]
        if choice.token_ids is not None:
            found["token_ids"] = [] if self._call.scores_only else choice.token_ids
        return found


async def _merged(jobs: Sequence[AsyncJob]) -> AsyncGenerator[tuple[int, ChatChunk], None]:
    """The chunks of all jobs with the numbers of their jobs. Raises the first error."""
    found: asyncio.Queue[tuple[int, ChatChunk] | BaseException | None] = asyncio.Queue(64)

    async def follow(number: int, job: AsyncJob) -> None:
        try:
            async for chunk in job.stream():
                await found.put((number, chunk))
            await found.put(None)
        except JobError as error:
            await found.put(error)

    tasks = [asyncio.create_task(follow(number, job)) for number, job in enumerate(jobs)]
    try:
        left = len(tasks)
        while left:
            one = await found.get()
            if one is None:
                left -= 1
            elif isinstance(one, tuple):
                yield one
            else:
                raise one
    finally:
        await end(*tasks)
