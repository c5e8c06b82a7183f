"""The openai package's client of responses against a gateway and a real worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError
from pydantic import BaseModel

from tests.jobs.gateway.conftest import Start
from tests.jobs.gateway.response_types import events_of, items_of, response_of
from tests.jobs.gateway.test_main_path import client_of
from tests.worker.checkpoints import make_checkpoint
from tests.worker.site import Site
from tests.worker.sources import read_tokenizer

SUM: Any = {"model": "demo", "input": "What is 17 + 25?", "temperature": 0}


class Sum(BaseModel):
    a: int
    b: bool


def test_responses_are_those_of_openais_client(site: Site, start: Start) -> None:
    site.worker(real=True, models=["demo"])
    site.wait_for_workers()
    client = client_of(start().url)

    response = client.responses.create(
        **SUM, include=["message.output_text.logprobs"], top_logprobs=2
    )
    response_of(response.to_dict())
    assert (response.output_text, response.status) == ("42", "completed")
    assert len(response.output[-1].content[0].logprobs[0].top_logprobs) == 2
    assert client.responses.retrieve(response.id) == response
    (item,) = client.responses.input_items.list(response.id)
    assert item.content[0].text == SUM["input"]

    events = list(client.responses.create(**SUM, stream=True))
    events_of(one.to_dict() for one in events)
    assert events[-1].response.output_text == "42"
    with client.responses.stream(**SUM) as stream:
        assert stream.get_final_response().output_text == "42"
    resumed = client.responses.stream(response_id=events[-1].response.id, starting_after=3)
    with resumed as stream:
        assert stream.get_final_response().output_text == "42"

    cut = client.responses.create(**SUM, max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    parsed = client.responses.parse(**SUM, text_format=Sum).output_parsed
    assert isinstance(parsed, Sum)

    client.responses.delete(response.id)
    with pytest.raises(NotFoundError) as unknown:
        client.responses.retrieve(response.id)
    assert unknown.value.code == "not_found"
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(**SUM, previous_response_id=response.id)
    assert refused.value.code == "previous_response_not_found"
    with pytest.raises(BadRequestError) as too_long:
        client.responses.create(model="demo", input="1 + " * 5000)
    assert too_long.value.code == "context_length_exceeded"
    *_, failed = client.responses.create(model="demo", input="1 + " * 5000, stream=True)
    assert (failed.type, failed.response.error.code) == ("response.failed", "invalid_prompt")


def test_calls_go_to_and_fro_between_responses(site: Site, start: Start, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", num_hidden_layers=1)
    answer = 'So:<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    script = [read_tokenizer(folder).encode(answer)]
    site.worker(real=True, models=[str(folder)], script=script)
    site.wait_for_workers()
    client = client_of(start().url)
    tools: Any = [
        {"type": "function", "name": "add", "parameters": {}, "strict": False},
        {"type": "web_search"},
    ]
    common: Any = {"model": "m", "tools": tools, "max_output_tokens": 100}
    first = client.responses.create(**common, input="1 + 2?", instructions="Add.")
    *_, call = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"a": 1})
    items_of(one.to_dict() for one in first.output)

    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    with client.responses.stream(
        **common, previous_response_id=first.id, input=[result], store=True
    ) as stream:
        second = stream.get_final_response()
    assert second.output[-1].arguments == call.arguments
    request = site.client.job(second.id.removeprefix("resp_")).request
    assert [message.role for message in request.messages] == ["user", "assistant", "tool"]
    assert [one.id for one in request.messages[1].tool_calls or ()] == [call.call_id]

    # Without the server's memory: the client sends all items itself.
    given: Any = [{"role": "user", "content": "1 + 2?"}, *first.output, result]
    third = client.responses.create(**common, input=given, store=False)
    assert third.usage.input_tokens == second.usage.input_tokens
    assert third.output_text == "So:"
