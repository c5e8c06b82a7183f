"""The openai package against a gateway, with a real Redis server and a real worker."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.jobs.gateway.conftest import Start
from tests.waiting import PATIENCE
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site
from tests.worker.sources import read_tokenizer

SUM: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
}


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=PATIENCE, max_retries=0)


def test_chats_and_streams_are_those_of_openais_client(site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    client = client_of(start().url)

    completion = client.chat.completions.create(**SUM, logprobs=True, top_logprobs=2)
    assert completion.choices[0].message.content == "42"
    assert completion.usage.total_tokens > completion.usage.prompt_tokens
    assert len(completion.choices[0].logprobs.content[0].top_logprobs) == 2

    chunks = list(client.chat.completions.create(**SUM, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "42"
    assert all("usage" not in c.model_dump(exclude_unset=True) for c in chunks)
    counted = list(
        client.chat.completions.create(**SUM, stream=True, stream_options={"include_usage": True})
    )
    assert [c.usage for c in counted[:-1]] == [None] * (len(counted) - 1)
    assert all("usage" in c.model_dump(exclude_unset=True) for c in counted)
    assert counted[-1].choices == []
    assert counted[-1].usage.total_tokens == completion.usage.total_tokens

    ids: Any = {"return_token_ids": True}
    told = client.chat.completions.create(**SUM, extra_body=ids)
    first, *later = client.chat.completions.create(**SUM, stream=True, extra_body=ids)
    assert first.prompt_token_ids == told.prompt_token_ids
    assert not any(hasattr(chunk, "prompt_token_ids") for chunk in later)
    streamed = (getattr(chunk.choices[0], "token_ids", []) for chunk in (first, *later))
    assert [*chain.from_iterable(streamed)] == told.choices[0].token_ids

    prompts: Any = {"model": "demo", "prompt": ["1 + 1", "2 + 35"], "n": 2, "temperature": 0}
    prompts |= {"max_tokens": 4, "extra_body": ids}
    told = client.completions.create(**prompts)
    first, _, other, _ = told.choices
    assert first.prompt_token_ids and first.prompt_token_ids != other.prompt_token_ids
    of_prompts: dict[int, list[int]] = {}
    of_answers: dict[int, list[int]] = defaultdict(list)
    for chunk in client.completions.create(**prompts, stream=True):
        for one in chunk.choices:
            if found := getattr(one, "prompt_token_ids", None):
                assert one.index not in of_prompts
                of_prompts[one.index] = found
            of_answers[one.index] += getattr(one, "token_ids", None) or []
    assert of_prompts == {one.index: one.prompt_token_ids for one in told.choices}
    assert of_answers == {one.index: one.token_ids for one in told.choices}
    scored: Any = {"echo": True, "max_tokens": 0, "extra_body": ids}
    (none,) = client.completions.create(model="demo", prompt="1 + 1", **scored).choices
    assert (none.prompt_token_ids, none.token_ids) == (first.prompt_token_ids, [])

    brief = client.chat.completions.create(**SUM, extra_body={"thinking_token_budget": 7})
    assert brief.choices[0].message.reasoning_content == "17+25"
    assert brief.usage.completion_tokens_details.reasoning_tokens == 7
    assert brief.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget is no field of a comp"):
        client.completions.create(model="demo", prompt="1", extra_body={"thinking_token_budget": 5})

    both = client.chat.completions.create(**{**SUM, "temperature": 1}, n=2, seed=1)
    assert [choice.index for choice in both.choices] == [0, 1]

    reply = client.chat.completions.with_raw_response.create(**SUM)
    assert reply.parse().id == f"chatcmpl-{reply.headers['x-request-id']}"
    assert site.client.job(reply.headers["x-request-id"]).status().over

    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"

    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(**{**SUM, "model": "gpt-9"})
    assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**SUM, "top_p": 2})
    assert refused.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "1 + " * 5000}]
        )
    assert too_long.value.code == "context_length_exceeded"
    assert too_long.value.response.headers["x-should-retry"] == "false"


def test_tool_calls_are_those_of_openais_client(site: Site, start: Start, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    script = [read_tokenizer(folder).encode(answer)]
    site.worker(real=True, models=[str(folder)], script=script)
    site.wait_for_workers()
    client = client_of(start().url)
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call: Any = {
        "model": "m",
        "messages": [{"role": "user", "content": "1 + 2?"}],
        "tools": [tool],
        "max_tokens": 100,
    }
    choice = client.chat.completions.create(**call).choices[0]
    (made,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1, "b": [2]})
    with client.chat.completions.stream(**call) as stream:
        final = stream.get_final_completion().choices[0]
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"a": 1, "b": [2]}
