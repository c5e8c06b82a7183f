"""/v1/completions: one job for each prompt, without the chat template.

With `echo` and `logprobs` it scores prompts, as lm-evaluation-harness asks for: the worker gives
the log-probabilities of their tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from jobs.api.answer import ChatCompletion, Choice, PromptLogprob, TokenLogprob, Usage
from jobs.api.chunk import ChatChunk
from jobs.api.wire import describe
from jobs.client.job import AsyncJob
from jobs.encoding import to_json
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.gateway.bodies import read_json
from jobs.gateway.endpoints import Gone, route, set_request_id
from jobs.gateway.events import DONE, EventStream, event, nothing
from jobs.gateway.failures import JsonReply, failed
from jobs.gateway.gateway import Gateway
from jobs.gateway.leaving import ClientLeft, end, until_left
from jobs.gateway.options import take_background, take_flag, wants_usage
from jobs.gateway.tenants import Tenant
from jobs.gateway.tokenizers import Prompts

PATH = "/v1/completions"
MAX_PROMPTS = 1000
DEFAULT_TOKENS = 16  # of OpenAI's completions
MOST_LOGPROBS = 20

NOT_OF_COMPLETIONS = (
    *("messages", "prompt_token_ids", "apply_chat_template", "prompt_logprobs"),
    "return_token_ids",
)
OF_PROMPT = ("messages", "prompt_token_ids")  # fields of a job that the prompt becomes

Prompt = str | list[int]


def routes(gateway: Gateway) -> list[Route]:
    return [route(gateway, "POST", PATH, _Completions(gateway).create)]


class Echo(NamedTuple):
    """The text of a prompt. `first`: that of its first token, if the prompt is token ids."""

    text: str
    first: str | None = None

    @classmethod
    def of(cls, prompt: Prompt, tokenizer: Prompts | None) -> Echo:
        """Without a tokenizer, as of a model behind another server, ids have no text."""
        if isinstance(prompt, str):
            return cls(prompt)
        if tokenizer is None:
            return cls("", "")
        return cls(tokenizer.decode(prompt), tokenizer.token_text(prompt[0]))


@dataclass(frozen=True, slots=True)
class Call:
    """A request: its prompts, and what its reply has. `scores_only`: no token is generated, though
    the job of each prompt generates one. `echoes`: of the prompts, with `echo`."""

    model: str
    prompts: Sequence[Prompt]
    rest: Mapping[str, Any]  # fields of each job
    n: int
    echo: bool
    logprobs: int | None
    scores_only: bool
    stream: bool
    usage: bool
    echoes: Sequence[Echo] = ()

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Call:
        """Raises InvalidRequest."""
        rest = dict(body)
        echo = take_flag(rest, "echo")
        stream = take_flag(rest, "stream")
        logprobs = _integer(rest, "logprobs", 0, MOST_LOGPROBS)
        tokens = _integer(rest, "max_tokens", 0, 2**31)
        if rest.pop("suffix", None):
            raise invalid("suffix is not supported: put it into the prompt", "suffix")
        for name in NOT_OF_COMPLETIONS:
            if rest.pop(name, None) is not None:
                raise invalid(f"{name} is no field of a completion: remove it", name)
        if tokens == 0 and not echo:
            raise invalid(
                "max_tokens: 0 tokens leave nothing to reply: set echo as well", "max_tokens"
            )
        if stream and echo and logprobs is not None:
            raise invalid(
                "stream: the log-probabilities of a prompt are not streamed: set it to false",
                "stream",
            )
        prompts = _prompts(rest.pop("prompt", None))
        options = rest.get("job")
        if len(prompts) > 1 and isinstance(options, dict):
            for name in ("id", "row", "custom_id"):
                if options.get(name) is not None:
                    raise invalid(
                        f"job.{name}: the request has {len(prompts)} prompts, of which each is a "
                        "job: send them one by one",
                        f"job.{name}",
                    )
        n = rest.get("n")
        return cls(
            model=str(rest.get("model")),
            prompts=prompts,
            rest=rest | {"max_tokens": DEFAULT_TOKENS if tokens is None else max(1, tokens)},
            n=n if isinstance(n, int) else 1,
            echo=echo,
            logprobs=logprobs,
            scores_only=tokens == 0,
            stream=stream,
            usage=wants_usage(body),
        )

    def jobs(self) -> list[dict[str, Any]]:
        """The request of each prompt's job."""
        fields: dict[str, Any] = {**self.rest, "apply_chat_template": False, "stream": self.stream}
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
            if self.echo:
                fields["prompt_logprobs"] = self.logprobs
        return [{**fields, **_source(prompt)} for prompt in self.prompts]


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
            raise _about_prompt(error) from None
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
            raise failed(_about_prompt(error)) from None
        return JsonReply(_reply(call, jobs[0].id, completions))

    async def _echoes(self, call: Call) -> list[Echo]:
        tokenizers, tokenizer = self._gateway.tokenizers, None
        if not all(isinstance(prompt, str) for prompt in call.prompts):
            model = (await self._gateway.models.models()).get(call.model)
            if model is not None and model.tokenizer is not None:
                tokenizer = await tokenizers.of(model)
        return await tokenizers.run(lambda: [Echo.of(one, tokenizer) for one in call.prompts])


def _reply(call: Call, job_id: str, completions: Sequence[ChatCompletion]) -> dict[str, Any]:
    choices = [
        _choice(call, number, completion, choice)
        for number, completion in enumerate(completions)
        for choice in completion.choices
    ]
    first = completions[0]
    return {
        **_head(job_id, first.created, call.model),
        "choices": choices,
        "usage": _usage(call, [one.usage for one in completions]),
        "system_fingerprint": first.system_fingerprint,
    }


def _head(job_id: str, created: int, model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job_id}",
        "object": "text_completion",
        "created": created,
        "model": model,
    }


def _usage(call: Call, usages: Sequence[Usage | None]) -> dict[str, Any]:
    """The counts of all jobs together."""
    prompt = sum(one.prompt_tokens for one in usages if one is not None)
    generated = sum(one.completion_tokens for one in usages if one is not None)
    generated = 0 if call.scores_only else generated
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }


def _choice(call: Call, number: int, completion: ChatCompletion, choice: Choice) -> dict[str, Any]:
    """A choice of the prompt with this number."""
    text = "" if call.scores_only else choice.message.content or ""
    tokens = Logprobs()
    scored = completion.prompt_logprobs
    if scored is not None:
        tokens.add_prompt(call.echoes[number], scored)
    echoed = ""
    if call.echo:
        echo = call.echoes[number]
        echoed = "".join(tokens.tokens) if echo.first is not None and scored else echo.text
    if choice.logprobs is not None and not call.scores_only:
        tokens.add(choice.logprobs.content or ())
    return {
        "index": number * call.n + choice.index,
        "text": echoed + text,
        "logprobs": None if call.logprobs is None else tokens.to_dict(),
        "finish_reason": "length" if call.scores_only else choice.finish_reason,
    }


@dataclass(slots=True)
class Logprobs:
    """`logprobs` of a choice, in the form of OpenAI's completions. `offset`: of the next token in
    the text."""

    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(
        self, prompt: Echo, scored: Sequence[Mapping[str, PromptLogprob] | None]
    ) -> None:
        """The tokens of a prompt. The first one has nothing before it, so it has no score."""
        of_token = [list(one.values()) for one in scored if one is not None]
        rest = "".join(values[0].decoded_token for values in of_token)
        first = prompt.first or ""
        if prompt.first is None and prompt.text.endswith(rest):
            first = prompt.text[: len(prompt.text) - len(rest)]
        self._append(first, None, None)
        for values in of_token:
            top = [(one.decoded_token, one.logprob) for one in values]
            self._append(values[0].decoded_token, values[0].logprob, top)

    def add(self, generated: Sequence[TokenLogprob]) -> None:
        for one in generated:
            top = [(one.token, one.logprob), *((t.token, t.logprob) for t in one.top_logprobs)]
            self._append(one.token, one.logprob, top)

    def _append(
        self, text: str, logprob: float | None, top: Sequence[tuple[str, float]] | None
    ) -> None:
        best: dict[str, float] = {}
        for token, value in top or ():  # several tokens may be no text of their own
            best[token] = max(value, best.get(token, value))
        self.tokens.append(text)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(None if top is None else best)
        self.text_offset.append(self.offset)
        self.offset += len(text)

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


async def _events(call: Call, jobs: Sequence[AsyncJob]) -> AsyncIterator[bytes]:
    """The streams of all jobs, as they come."""
    usages: list[Usage | None] = []
    head: dict[str, Any] = {}
    offsets: dict[int, int] = {}
    async with aclosing(_merged(jobs)) as chunks:
        async for number, chunk in chunks:
            head = _head(jobs[0].id, chunk.created, call.model)
            if chunk.usage is not None:
                usages.append(chunk.usage)
            if chunk.choices:
                content = {**head, "choices": _deltas(call, number, chunk, offsets)}
                yield event(to_json(content | ({"usage": None} if call.usage else {})))
    if call.usage:
        yield event(to_json({**head, "choices": [], "usage": _usage(call, usages)}))
    yield DONE


def _deltas(
    call: Call, number: int, chunk: ChatChunk, offsets: dict[int, int]
) -> list[dict[str, Any]]:
    """The choices of a chunk. `offsets`: characters that each choice has had; it is updated."""
    deltas = []
    for choice in chunk.choices:
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
        deltas.append(
            {
                "index": index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
        )
    return deltas


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


def _source(prompt: Prompt) -> dict[str, Any]:
    """The fields of a request that hold its prompt."""
    if isinstance(prompt, str):
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"messages": [{"role": "user", "content": ""}], "prompt_token_ids": prompt}


def _prompts(value: Any) -> list[Prompt]:
    """The prompts of a request: one or several, as texts or as token ids. Raises InvalidRequest."""
    if value is None:
        raise invalid("field 'prompt' is required", "prompt")
    if _is_prompt(value):
        return [value]
    if isinstance(value, list) and value and all(map(_is_prompt, value)):
        if len(value) > MAX_PROMPTS:
            raise invalid(
                f"prompt: a request has at most {MAX_PROMPTS} prompts, got {len(value)}", "prompt"
            )
        return value
    raise invalid(
        "prompt: expected a text, token ids, or a list of texts or of lists of token ids, got "
        f"{describe(value)}",
        "prompt",
    )


def _about_prompt(error: JobError) -> JobError:
    """An error of a job that names the field of this route."""
    if error.param is None or error.param.partition("[")[0] not in OF_PROMPT:
        return error
    return JobError.from_dict({**error.to_dict(), "param": "prompt"})


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(type(one) is int for one in value)
    return isinstance(value, str)


def _integer(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """Remove an integer. Raises InvalidRequest."""
    value = body.pop(name, None)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise invalid(
            f"{name}: expected an integer from {least} to {most}, got {describe(value)}", name
        )
    return value
