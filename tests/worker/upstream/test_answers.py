"""Answers of an upstream become streams, results and rows as those of own models."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest

from jobs import JobError
from jobs.operations import SCORE
from tests.worker.site import Site
from tests.worker.upstream.conftest import Burst
from tests.worker.upstream.fake_server import Exchange, FakeServer, words_of

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def text_of(prompt: str) -> str:
    return "".join(words_of(prompt))


def test_a_job_has_its_stream_its_result_and_its_row(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    job = site.submit("hello there", temperature=0.5, max_tokens=20, seed=7, run="r")
    burst()
    chunks = list(job.stream())
    assert "".join(chunk.text for chunk in chunks) == text_of("hello there")
    result = job.result(timeout=1)
    assert (result.text, result.finish_reason) == (text_of("hello there"), "stop")
    assert result.usage is not None
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 4)
    row = site.row(job, "r")
    assert (row["text"], row["status"], row["finish_reason"]) == (result.text, "ok", "stop")
    assert (row["input_tokens"], row["output_tokens"]) == (3, 4)
    assert (row["seed"], row["temperature"], row["max_tokens"]) == (7, 0.5, 20)
    assert (row["model"], row["engine"]) == ("fake", "upstream")
    assert row["model_fingerprint"] == "upstream there"
    assert row["device_name"] == server.url
    assert (row["dtype"], row["torch_version"], row["tokenizer_hash"]) == (None, None, None)
    assert row["enqueued_at"] <= row["started_at"] <= row["first_token_at"] <= row["finished_at"]
    assert row["tpot_s"] is not None
    site.assert_settled([job], "r")


def test_the_body_has_the_fields_of_the_request_and_no_others(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    site.submit(
        temperature=0,
        max_tokens=5,
        top_k=3,
        stop=["x"],
        tools=[TOOL],
        tool_choice="auto",
        enable_thinking=False,
        chat_template="{{ messages }}",
        response_format={"type": "json_object"},
        user="somebody",
        store=True,
    )
    burst()
    (body,) = server.bodies
    assert body == {
        "model": "there",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0,
        "max_tokens": 5,
        "top_k": 3,
        "stop": ["x"],
        "tools": [TOOL],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "chat_template": "{{ messages }}",
        "response_format": {"type": "json_object"},
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_reasoning_is_kept_by_either_name(site: Site, server: FakeServer, burst: Burst) -> None:
    def answer(exchange: Exchange) -> None:
        fields: Any = {exchange.prompt: "I think"}
        exchange.begin()
        exchange.chunk(**fields)
        exchange.chunk(content="5")
        exchange.chunk(reason="stop")
        exchange.end(completion_tokens_details={"reasoning_tokens": 2})

    server.answer = answer
    jobs = site.submit_many(["reasoning_content", "reasoning"])
    burst()
    for job in jobs:
        message = job.result(timeout=1).choices[0].message
        assert (message.reasoning_content, message.content) == ("I think", "5")
        streamed = [chunk.choices[0].delta.reasoning_content for chunk in job.stream()]
        assert "I think" in streamed
        row = site.row(job)
        assert (row["reasoning"], row["text"], row["reasoning_tokens"]) == ("I think", "5", 2)


def test_tool_calls_are_put_together_and_streamed_whole(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        call = {"index": 0, "id": "call_1", "type": "function"}
        exchange.chunk(tool_calls=[{**call, "function": {"name": "add", "arguments": ""}}])
        for part in ('{"a"', ": 1}"):
            exchange.chunk(tool_calls=[{"index": 0, "function": {"arguments": part}}])
        exchange.chunk(tool_calls=[{"index": 1, "function": {"name": "sub", "arguments": "{}"}}])
        exchange.chunk(reason="tool_calls")
        exchange.end()

    server.answer = answer
    job = site.submit(tools=[TOOL])
    burst()
    result = job.result(timeout=1)
    message = result.choices[0].message
    assert (result.finish_reason, message.content) == ("tool_calls", None)
    assert message.tool_calls is not None
    calls = [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls]
    assert calls == [("add", {"a": 1}), ("sub", {})]
    first, second = (one.id for one in message.tool_calls)
    assert first == "call_1"
    assert second.startswith("call_")
    streamed = [
        call.model_dump(exclude={"index"})
        for chunk in job.stream()
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert streamed == [one.model_dump() for one in message.tool_calls]
    assert [call["function"]["name"] for call in site.row(job)["tool_calls"]] == ["add", "sub"]


def test_logprobs_are_kept(site: Site, server: FakeServer, burst: Burst) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        for text, value in (("a", -0.5), ("é", -1.5)):
            token = {"token": text, "logprob": value, "bytes": list(text.encode()), "id": 3}
            top = [{"token": text, "logprob": value}, {"token": "z", "logprob": -9}]
            exchange.chunk(content=text, logprobs={"content": [{**token, "top_logprobs": top}]})
        exchange.chunk(reason="length")
        exchange.end(output=2)

    server.answer = answer
    job = site.submit(logprobs=True, top_logprobs=2)
    burst()
    logprobs = job.result(timeout=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(one.token, one.logprob) for one in logprobs.content] == [("a", -0.5), ("é", -1.5)]
    assert [one.token for one in logprobs.content[0].top_logprobs] == ["a", "z"]
    row = site.row(job)
    assert (row["tokens"], row["token_logprobs"]) == (["a", "é"], [-0.5, -1.5])
    assert (row["logprob_sum"], row["finish_reason"]) == (-2.0, "length")


def test_a_refusal_is_kept(site: Site, server: FakeServer, burst: Burst) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(refusal="I can't ")
        exchange.chunk(refusal="do that.")
        exchange.chunk(reason="stop")
        exchange.end()

    server.answer = answer
    job = site.submit()
    burst()
    message = job.result(timeout=1).choices[0].message
    assert (message.content, message.refusal) == (None, "I can't do that.")
    assert site.row(job)["text"] is None


def test_several_choices_have_a_row_each(site: Site, server: FakeServer, burst: Burst) -> None:
    job = site.submit("hi", n=3)
    burst()
    assert [one.message.content for one in job.result(timeout=1).choices] == [text_of("hi")] * 3
    assert sorted(choice for _, choice in site.written()) == [0, 1, 2]


def test_a_server_that_knows_one_choice_only_fails_the_job(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.body["n"] = 1
        from tests.worker.upstream.fake_server import echo

        echo(exchange)

    server.answer = answer
    job = site.submit(n=2)
    burst()
    with pytest.raises(JobError, match=r"returned 1 of 2 answers") as failure:
        job.result(timeout=1)
    assert (failure.value.code, failure.value.param) == ("invalid_request", "n")


def test_odd_events_are_read(site: Site, server: FakeServer, burst: Burst) -> None:
    """Comments, other fields, CR LF, an event in pieces, and texts with other line breaks."""

    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.raw(b": ping\r\n\r\nevent: message\r\nid: 1\r\n")
        text = json.dumps(
            {"choices": [{"index": 0, "delta": {"content": "a\u2028b\x85c"}}]}, ensure_ascii=False
        ).encode()
        exchange.raw(b"data:" + text[:30])
        exchange.raw(text[30:] + b"\r\n\r\n")
        exchange.chunk(reason="stop")
        exchange.end()

    server.answer = answer
    job = site.submit()
    burst()
    assert job.result(timeout=1).text == "a\u2028b\x85c"


def test_a_stream_without_usage_has_no_counts(site: Site, server: FakeServer, burst: Burst) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        exchange.chunk(content="yes", reason="stop")
        exchange.raw(b"")

    server.answer = answer
    job = site.submit()
    burst()
    assert job.result(timeout=1).usage is None
    row = site.row(job)
    assert (row["text"], row["output_tokens"]) == ("yes", None)


def test_turns_of_a_session_send_all_messages(site: Site, server: FakeServer, burst: Burst) -> None:
    session = site.client.session(model="fake", system="Be brief.")
    first = session.submit("one")
    burst()
    second = session.submit("two")
    burst()
    assert [job.result(timeout=1).text for job in (first, second)] == [
        text_of("one"),
        text_of("two"),
    ]
    assert [message["content"] for message in server.bodies[1]["messages"]] == [
        "Be brief.",
        "one",
        text_of("one"),
        "two",
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 1, "stream": False}, "prompt_logprobs"),
        ({"truncate": "oldest"}, "truncate"),
        ({"prompt_token_ids": [1, 2]}, "prompt_token_ids"),
        ({"apply_chat_template": False}, "apply_chat_template"),
        ({"separate_reasoning": False}, "separate_reasoning"),
    ],
)
def test_what_http_can_not_do_is_refused_per_job(
    site: Site, server: FakeServer, burst: Burst, fields: dict[str, Any], param: str
) -> None:
    bad, good = site.submit(**fields), site.submit("good")
    burst()
    assert good.result(timeout=1).text == text_of("good")
    with pytest.raises(JobError, match=f"{param}.*upstream {server.url}") as failure:
        bad.result(timeout=1)
    assert (failure.value.code, failure.value.param) == ("invalid_request", param)
    assert len(server.bodies) == 1


def test_token_ids_are_those_that_the_upstream_sends(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    def answer(exchange: Exchange) -> None:
        exchange.begin()
        first = {"index": 0, "delta": {"content": "a"}, "token_ids": [5], "finish_reason": None}
        exchange.event({"choices": [first], "prompt_token_ids": [1, 2]})
        exchange.event(
            {"choices": [{"index": 0, "delta": {}, "token_ids": [6], "finish_reason": "stop"}]}
        )
        exchange.end()

    silent = site.submit(return_token_ids=True, stream=False)
    burst()
    completion = silent.result(timeout=1)
    assert completion.prompt_token_ids is None and completion.choices[0].token_ids is None
    server.answer = answer
    asked, plain = site.submit(return_token_ids=True, stream=False), site.submit()
    burst()
    completion = asked.result(timeout=1)
    assert (completion.prompt_token_ids, completion.choices[0].token_ids) == ([1, 2], [5, 6])
    assert plain.result(timeout=1).choices[0].token_ids is None
    live = site.submit(return_token_ids=True, stream=True)
    burst()
    chunks = list(live.stream())
    assert [one.prompt_token_ids for one in chunks] == [[1, 2], *[None] * (len(chunks) - 1)]
    ids = [one.choices[0].token_ids or [] for one in chunks]
    assert [*chain.from_iterable(ids)] == [5, 6]
    asked_for = Counter(body.get("return_token_ids") for body in server.bodies)
    assert asked_for == {True: 3, None: 1}


def test_a_scoring_job_is_left_to_a_worker_with_the_models_files(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    items = [{"kind": "perplexity", "prompt": "some text"}]
    job, chat = site.client.submit({"model": "fake", "items": items}), site.submit()
    burst()
    assert chat.result(timeout=1).text == text_of("hello")
    assert job.status() == "queued"
    assert site.redis.lrange(f"rq:queue:chat:fake {SCORE.func}", 0, -1) == [job.id.encode()]
    assert [one["content"] for body in server.bodies for one in body["messages"]] == ["hello"]


def test_no_more_than_the_batch_are_sent_at_a_time(
    site: Site, server: FakeServer, burst: Burst
) -> None:
    jobs = site.submit_many([f"q{number}" for number in range(60)])
    burst(max_batch=5)
    assert [job.result(timeout=1).text for job in jobs] == [
        text_of(f"q{number}") for number in range(60)
    ]
    assert server.peak <= 5
    site.assert_settled(jobs)
