"""Each way in which the openai package calls chat completions, and what it makes of the replies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from pydantic import BaseModel

from jobs import ChatRequest, JobError
from jobs.errors import ERROR_CODES
from jobs.gateway.failures import STATUS
from jobs.store.job_state import Status
from jobs.testing import Answer, FakeWorker
from tests.jobs.gateway.conftest import Start, chat
from tests.jobs.gateway.in_process import app_of
from tests.jobs.gateway.test_main_path import SUM, client_of
from tests.waiting import PATIENCE, wait_until
from tests.worker.fake_backend import text_of
from tests.worker.site import Site

ASK: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
CLASSES: dict[int, type[openai.APIStatusError]] = {
    400: openai.BadRequestError,
    404: openai.NotFoundError,
    409: openai.ConflictError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
    503: openai.InternalServerError,
    504: openai.InternalServerError,
}


class Verdict(BaseModel):
    answer: Literal["yes", "no"]


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


CALL = {"id": "c1", "function": {"name": "Add", "arguments": '{"a":17,"b":25}'}}


def talk(
    worker: FakeWorker,
    say: Callable[[openai.AsyncOpenAI], Awaitable[Any]],
    *,
    key: str = "none",
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> list[httpx2.Response]:
    """Let `say` call a gateway in this process. Returns the replies that its client read."""
    replies: list[httpx2.Response] = []

    async def keep(reply: httpx2.Response) -> None:
        replies.append(reply)

    async def main() -> None:
        async with app_of(worker, settings) as app:
            transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
            hooks: Any = {"response": [keep]}
            http = httpx2.AsyncClient(transport=transport, event_hooks=hooks)
            url = "http://localhost/v1"
            client = openai.AsyncOpenAI(base_url=url, api_key=key, http_client=http, **options)
            async with client:
                await say(client)

    asyncio.run(main())
    return replies


def test_an_answer_is_parsed_into_a_type_of_the_client() -> None:
    worker = FakeWorker(['{"answer":"yes"}', Answer('{"answer":', finish_reason="length")])

    async def say(client: openai.AsyncOpenAI) -> None:
        parsed = await client.chat.completions.parse(**ASK, response_format=Verdict)
        assert parsed.choices[0].message.parsed == Verdict(answer="yes")
        assert parsed._request_id == parsed.id.removeprefix("chatcmpl-")
        with pytest.raises(openai.LengthFinishReasonError):
            await client.chat.completions.parse(**ASK, response_format=Verdict)

    talk(worker, say)
    form = worker.requests[0].response_format
    assert form is not None and form.json_schema is not None
    assert form.json_schema["name"] == "Verdict" and form.json_schema["strict"] is True


@pytest.mark.filterwarnings("ignore::jobs.api.request.IgnoredFieldWarning")
def test_calls_are_parsed_into_types_of_the_client() -> None:
    worker = FakeWorker(Answer(tool_calls=[CALL]))

    async def say(client: openai.AsyncOpenAI) -> None:
        ask = {**ASK, "tools": [openai.pydantic_function_tool(Add)]}
        message = (await client.chat.completions.parse(**ask)).choices[0].message
        assert message.tool_calls[0].function.parsed_arguments == Add(a=17, b=25)
        assert message.content is None
        # The object of the client goes back as history, with the result of the call.
        result = {"role": "tool", "tool_call_id": "c1", "content": "42"}
        await client.chat.completions.create(
            **{**ask, "messages": [*ASK["messages"], message, result]}
        )

    talk(worker, say)
    history = worker.requests[1].messages
    assert [one.role for one in history] == ["user", "assistant", "tool"]
    assert history[1].tool_calls is not None
    (call,) = history[1].tool_calls
    assert call.function.arguments == '{"a":17,"b":25}'


def test_a_stream_has_the_events_of_the_client() -> None:
    worker = FakeWorker([Answer(['{"answer":', '"no"}']), Answer(tool_calls=[CALL])])
    seen: list[str] = []

    async def say(client: openai.AsyncOpenAI) -> None:
        async with client.chat.completions.stream(**ASK, response_format=Verdict) as stream:
            seen.extend([event.type async for event in stream])
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == Verdict(answer="no")
        ask = {**ASK, "tools": [openai.pydantic_function_tool(Add)]}
        async with client.chat.completions.stream(**ask) as stream:
            done = [
                event
                async for event in stream
                if event.type == "tool_calls.function.arguments.done"
            ]
            final = await stream.get_final_completion()
        assert [event.parsed_arguments for event in done] == [Add(a=17, b=25)]
        assert final.choices[0].finish_reason == "tool_calls"

    talk(worker, say)
    assert "content.delta" in seen and seen.count("content.done") == 1


def test_choices_and_counts_of_a_stream_are_the_clients() -> None:
    worker = FakeWorker([["one two", "three"]])
    texts, usages = {0: "", 1: ""}, []

    async def say(client: openai.AsyncOpenAI) -> None:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        async for chunk in await client.chat.completions.create(**ASK, n=2, **options):
            usages.append(chunk.usage)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""

    talk(worker, say)
    assert texts == {0: "one two", 1: "three"}
    assert [one for one in usages if one is not None] == usages[-1:]
    assert usages[-1].completion_tokens == 3


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("code", ERROR_CODES)
def test_each_error_has_a_class_of_the_client_and_is_retried_only_if_that_helps(
    code: Any, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    worker = FakeWorker(lambda request: Answer("", error=JobError(code, "no luck", "model")))

    async def say(client: openai.AsyncOpenAI) -> None:
        job = {"job": {"retries": 0}}
        with pytest.raises(CLASSES[STATUS[code]]) as raised:
            await client.chat.completions.create(**ASK, stream=streams, extra_body=job)
        assert type(raised.value) is CLASSES[STATUS[code]]
        assert (raised.value.code, raised.value.param) == (code, "model")
        assert raised.value.request_id == raised.value.response.headers["x-request-id"]

    replies = talk(worker, say, max_retries=2)
    assert waits == ([2.0, 2.0] if code == "unavailable" else [])
    assert len(replies) == 1 + len(waits)


def test_a_wrong_key_is_the_clients_error(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.a]\nkeys = ["right"]\n')

    async def right(client: openai.AsyncOpenAI) -> None:
        assert [one.id async for one in client.models.list()] == ["any"]

    async def wrong(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError) as raised:
            await client.models.list()
        assert raised.value.code == "invalid_api_key"

    settings = {"api_key_file": file}
    talk(FakeWorker(), right, key="right", settings=settings)
    assert len(talk(FakeWorker(), wrong, key="wrong", settings=settings)) == 1


def test_raw_replies_and_fields_of_the_queue_go_through_the_client() -> None:
    worker = FakeWorker("Hello")

    async def say(client: openai.AsyncOpenAI) -> None:
        create = client.chat.completions.with_raw_response.create
        extra = {"job": {"id": "mine", "tags": ["a"]}, "top_k": 5, "background": True}
        raw = await create(**ASK, extra_body=extra)
        assert raw.headers["x-request-id"] == raw.request_id == "mine"
        assert raw.parse().id == "chatcmpl-mine"
        stream = client.chat.completions.with_streaming_response
        async with stream.create(**ASK, stream=True) as reply:
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            lines = [line async for line in reply.iter_lines()]
        assert [line for line in lines if line][-1] == "data: [DONE]"
        again = await client.chat.completions.retrieve("chatcmpl-mine")
        assert again.choices[0].message.content == "Hello"

    talk(worker, say)
    assert (worker.requests[0].top_k, worker.requests[0].job.tags) == (5, ["a"])


def test_a_client_that_closes_a_stream_or_times_out_cancels_its_job(
    site: Site, start: Start
) -> None:
    site.worker(delay=0.05)
    site.wait_for_workers()
    client = client_of(start().url)
    endless = chat(metadata={"words": "100000"})
    for chunk in client.chat.completions.create(
        **endless, stream=True, extra_body={"job": {"id": "closed"}}
    ):
        assert chunk.id == "chatcmpl-closed"
        break
    client.close()
    wait_until(lambda: site.client.job("closed").status() is Status.CANCELLED)

    client = client_of(start().url).with_options(timeout=httpx2.Timeout(PATIENCE, read=0.5))
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(**endless, extra_body={"job": {"id": "late"}})
    wait_until(lambda: site.client.job("late").status() is Status.CANCELLED)


def test_many_calls_of_an_async_client_have_their_own_answers(site: Site, start: Start) -> None:
    site.worker()
    site.wait_for_workers()
    url = f"{start().url}/v1"

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        body = chat(f"number {number}")
        if number % 2:
            whole = await client.chat.completions.create(**body)
            return whole.choices[0].message.content or ""
        parts = await client.chat.completions.create(**body, stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=PATIENCE) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(40)))

    wanted = [text_of(ChatRequest.parse(chat(f"number {number}"))) for number in range(40)]
    assert asyncio.run(main()) == wanted


def test_logprobs_and_forms_of_a_model_are_the_clients(site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    client = client_of(start().url)
    ask = {**SUM, "logprobs": True, "top_logprobs": 3, "max_tokens": 60}
    whole = client.chat.completions.create(**ask).choices[0]
    tokens = whole.logprobs.content
    streamed = [
        token
        for chunk in client.chat.completions.create(**ask, stream=True)
        for choice in chunk.choices
        for token in (choice.logprobs.content or () if choice.logprobs else ())
    ]
    assert [one.token for one in streamed] == [one.token for one in tokens]
    for one in tokens:
        assert len(one.top_logprobs) == 3 and one.logprob <= one.top_logprobs[0].logprob + 1e-6
        assert bytes(one.bytes).decode(errors="replace") == one.token

    parsed = client.chat.completions.parse(**SUM, max_tokens=200, response_format=Verdict)
    assert parsed.choices[0].message.parsed.answer in ("yes", "no")
    with client.chat.completions.stream(**SUM, max_tokens=200, response_format=Verdict) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.parsed == parsed.choices[0].message.parsed
