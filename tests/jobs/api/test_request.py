"""Invalid requests are refused with one sentence that names the field."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType
from typing import Any

import pytest
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk

from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.api.chunk import ChatChunk, ChoiceDelta, ChunkChoice
from jobs.api.params import JobFields
from jobs.api.request import ChatRequest, IgnoredFieldWarning
from jobs.api.sampling import Sampling
from jobs.errors import InvalidRequest, JobError

GOOD: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        (
            {"temprature": 1},
            "temprature",
            "unknown field 'temprature'; did you mean 'temperature'?",
        ),
        ({"zzz": 1}, "zzz", "guided_choice, guided_grammar, guided_json, guided_regex"),
        ({"guided_jsn": {}}, "guided_jsn", "did you mean 'guided_json'?"),
        ({"guided_choice": []}, "guided_choice", "guided_choice is empty"),
        ({"guided_regex": ""}, "guided_regex", "guided_regex is empty"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0, got -1"),
        ({"temperature": "0.5"}, "temperature", "expected a number, got '0.5'"),
        ({"temperature": True}, "temperature", "expected a number, got a boolean"),
        ({"temperature": float("nan")}, "temperature", "finite"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
        ({"max_tokens": 2.5}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "messages is empty"),
        ({"model": ""}, "model", "model is empty"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content[0].type",
            "must be 'text', got 'image_url'",
        ),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must be token ids"),
        ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "nested deeper than 64 levels"),
        ({"chat_template_kwargs": {"x": 10**5000}}, "chat_template_kwargs", "of more than 1024"),
        ({"tools": [{"type": "function", "function": DEEP}]}, "tools", "nested deeper than 64"),
        ({"messages": "hi"}, "messages", "expected a list"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "got 'bot'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "a user message needs content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "got 3"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stop": ["a", 3]}, "stop[1]", "string"),
        ({"stop": ""}, "stop", "can't be empty"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids, got 'x'"),
        ({"top_logprobs": 3}, "top_logprobs", "requires logprobs"),
        ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "greater than max_tokens 3"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "set only one"),
        (
            {"job": {"id": "a b"}},
            "job.id",
            "must have 1 to 200 letters, digits, '_' and '-', got 'a b'",
        ),
        ({"job": {"prio": 1}}, "job.prio", "unknown field 'job.prio'"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"job": {"row": 2**62}}, "job.row", "less than"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else next(iter(value)),
)
def test_a_bad_field_is_named(change: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatRequest(**{**GOOD, **change})
    assert caught.value.code == "invalid_request"
    assert caught.value.param == param
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_missing_field_is_named(name: str) -> None:
    fields = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(JobError, match=f"field '{name}' is required"):
        ChatRequest(**fields)


@pytest.mark.parametrize("text", ['{"model', "[]", '"hi"', "3"])
def test_text_that_is_not_a_request_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatRequest.parse(text)


def test_a_request_round_trips_through_json() -> None:
    request = ChatRequest(
        **GOOD,
        temperature=0,
        stop="x",
        seed=7,
        logit_bias={5: 1.5},
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"a": [1]}}}],
        job={"run": "r", "row": 3, "priority": "bulk"},
    )
    assert ChatRequest.parse(request.to_json()) == request
    assert ChatRequest.parse(request.to_dict()).sampling() == Sampling(
        temperature=0, stop="x", seed=7, logit_bias={"5": 1.5}
    )


def test_openai_fields_without_effect_are_ignored_with_a_warning() -> None:
    with pytest.warns(IgnoredFieldWarning, match="service_tier, verbosity"):
        request = ChatRequest(**{**GOOD, "verbosity": "low", "service_tier": "auto"})
    assert "verbosity" not in request.to_dict()


def test_max_completion_tokens_is_an_alias_of_max_tokens() -> None:
    request = ChatRequest(**GOOD, max_completion_tokens=9)
    assert (request.max_tokens, request.max_completion_tokens) == (9, None)


def test_bulk_jobs_publish_only_on_request() -> None:
    bulk: JobFields = {"priority": "bulk"}
    assert ChatRequest(**GOOD).publishes
    assert not ChatRequest(**GOOD, job=bulk).publishes
    assert ChatRequest(**GOOD, job=bulk, stream=True).publishes
    assert not ChatRequest(**GOOD, stream=False).publishes


def test_an_error_round_trips_through_json_and_pickle() -> None:
    error = JobError("out_of_memory", "needs 9 GiB", "messages")
    for copy in (
        JobError.from_dict(json.loads(json.dumps(error.to_dict()))),
        pickle.loads(pickle.dumps(error)),
    ):
        assert (copy.code, copy.message, copy.param) == (error.code, error.message, error.param)
        assert copy.retryable
    assert JobError.from_dict({"code": "unknown", "message": "m"}).code == "internal"
    assert isinstance(JobError.from_dict({"code": "invalid_request"}), InvalidRequest)


def test_answers_validate_as_openai_types() -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    message = AssistantMessage(content=None, reasoning_content="hm")
    whole = ChatCompletion(
        id="c",
        created=1,
        model="demo",
        choices=[Choice(index=0, message=message, finish_reason="length")],
        usage=usage,
    )
    parsed = OpenAICompletion.model_validate(whole.to_dict())
    assert parsed.choices[0].finish_reason == "length"
    assert whole.to_dict()["choices"][0]["message"]["content"] is None
    chunk = ChatChunk(
        id="c",
        created=1,
        model="demo",
        choices=[ChunkChoice(index=0, delta=ChoiceDelta(role="assistant", content="a"))],
        cursor="1-1",
    )
    assert OpenAIChunk.model_validate(chunk.to_dict()).choices[0].delta.content == "a"
    assert chunk.to_dict()["choices"][0]["finish_reason"] is None


def test_messages_may_come_from_a_generator_or_a_tuple() -> None:
    expected = ChatRequest.parse(GOOD).to_dict()
    assert (
        ChatRequest(model="demo", messages=(one for one in GOOD["messages"])).to_dict() == expected
    )
    assert ChatRequest(model="demo", messages=tuple(GOOD["messages"])).to_dict() == expected


def test_a_request_may_be_any_mapping() -> None:
    assert ChatRequest.parse(MappingProxyType(GOOD)).to_dict() == ChatRequest.parse(GOOD).to_dict()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"temprature": 0}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"run": "r"}, "unknown field 'run'; did you mean 'job.run'?"),
        ({"job": {"custom-id": 1}}, "field 'job.custom-id'; did you mean 'job.custom_id'?"),
        ({"job": {"customid": "x"}}, "unknown field 'job.customid'; did you mean 'job.custom_id'?"),
        (
            {"stream_options": {"usage": True}},
            "'stream_options.usage'; known fields: include_usage",
        ),
        ({"job": {"zzz": 1}}, "unknown field 'job.zzz'; known fields: at, custom_id, delay, "),
        ({"zzzzz": 1}, "unknown field 'zzzzz'; known fields: "),
        (
            {"messages": [{"role": "user", "contents": "x"}]},
            "unknown field 'messages[0].contents'; did you mean 'messages[0].content'?",
        ),
    ],
)
def test_an_unknown_field_is_named_with_what_may_be_meant(
    fields: dict[str, Any], message: str
) -> None:
    request: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], **fields}
    with pytest.raises(InvalidRequest) as caught:
        ChatRequest.parse(request)
    assert message in caught.value.message


@pytest.mark.parametrize("name", ["delay", "ttl"])
def test_a_time_of_more_than_ten_years_is_refused(name: str) -> None:
    for seconds in (1e16, 1e300):
        with pytest.raises(InvalidRequest) as caught:
            ChatRequest.parse({**GOOD, "job": {name: seconds}})
        assert caught.value.param == f"job.{name}"
    assert ChatRequest.parse({**GOOD, "job": {name: 10 * 365 * 86_400}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": ["f"]}, "tools[0]: expected an object, got 'f'"),
        ({"stream_options": 3}, "stream_options: expected an object, got 3"),
        ({"metadata": [1]}, "metadata: expected an object, got a list"),
        ({"user": 3}, "user: expected a string, got 3"),
        ({"stream": "yes"}, "stream: expected true or false, got 'yes'"),
        ({"max_tokens": "3"}, "max_tokens: expected an integer, got '3'"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a list, got 3"),
        ({"temperature": 101}, "temperature: must be less than or equal to 100, got 101"),
        (
            {"reasoning_effort": "big"},
            "reasoning_effort: must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or "
            "'max', got 'big'",
        ),
        (
            {"job": {"run": "a b"}},
            "job.run: must have 1 to 100 letters, digits, '_', '-' and '.', and not begin with "
            "'.', got 'a b'",
        ),
        ({"a\nb[red]": 1}, r"unknown field 'a\nb[red]'; known fields: "),
    ],
    ids=str,
)
def test_errors_are_in_plain_words(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        ChatRequest.parse({"model": "m", "messages": [{"role": "user", "content": "a"}], **fields})
    assert caught.value.message.startswith(message)


def test_an_integer_with_too_many_digits_is_refused_in_plain_words() -> None:
    with pytest.raises(JobError) as caught:
        ChatRequest.parse('{"seed": 1' + "0" * 5000 + "}")
    assert caught.value.message == (
        "the request is not JSON that can be read: a number has more than 4300 digits"
    )
    with pytest.raises(JobError, match="nested too deep"):
        ChatRequest.parse("[" * 100_000)
