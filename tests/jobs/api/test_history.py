"""History is taken as OpenAI, vLLM and litellm return it; fields without meaning are named."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionMessage as OpenAIMessage
from openai.types.chat import ParsedChatCompletionMessage, ParsedFunctionToolCall

from jobs import ChatRequest
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice
from jobs.api.message import FunctionCall, ToolCall
from jobs.api.request import IgnoredFieldWarning
from jobs.errors import InvalidRequest
from jobs.results.rows import request_hash

HELLO = {"role": "user", "content": "Hello"}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": 1}'},
}
CALLING = {"role": "assistant", "tool_calls": [CALL]}


def taken(*messages: Any, **fields: Any) -> dict[str, Any]:
    """The request as it is sent; no warning is expected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ChatRequest(model="m", messages=[HELLO, *messages], **fields).to_dict()


def warned(*messages: Any, **fields: Any) -> tuple[dict[str, Any], str]:
    """The request as it is sent, and the warning."""
    with pytest.warns(IgnoredFieldWarning) as caught:
        request = ChatRequest(model="m", messages=[HELLO, *messages], **fields)
    (one,) = caught
    return request.to_dict(), str(one.message)


OPENAI = OpenAICompletion.model_validate(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "gpt",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {
                    "role": "assistant",
                    "content": "Hi",
                    "refusal": None,
                    "annotations": [],
                },
            }
        ],
    }
)
OURS = ChatCompletion(
    id="c",
    created=1,
    model="m",
    choices=[
        Choice(
            index=0,
            finish_reason="stop",
            message=AssistantMessage(content="Hi", reasoning_content="Greet."),
        )
    ],
)
VLLM = {
    "role": "assistant",
    "content": "Hi",
    "refusal": None,
    "annotations": None,
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": "Greet.",
    "reasoning_content": "Greet.",
}
LITELLM = {
    "role": "assistant",
    "content": "Hi",
    "tool_calls": None,
    "function_call": None,
    "images": [],
    "thinking_blocks": None,
    "provider_specific_fields": {"refusal": None},
    "annotations": [],
}
PARSED_CALL = ParsedFunctionToolCall.model_validate(CALL)
PLAIN = {"role": "assistant", "content": "Hi"}
REASONED = {**PLAIN, "reasoning_content": "Greet."}


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (OPENAI.choices[0].message.model_dump(), PLAIN),
        (OPENAI.choices[0].message.to_dict(), PLAIN),
        (OPENAI.choices[0].message, PLAIN),
        (OURS.choices[0].message.model_dump(), REASONED),
        (OURS.to_dict()["choices"][0]["message"], REASONED),
        (OURS.choices[0].message, REASONED),
        (VLLM, {**REASONED, "tool_calls": []}),
        (LITELLM, PLAIN),
        ({"role": "assistant", "content": None, "refusal": "No."}, {**PLAIN, "content": "No."}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant"}),
        ({**CALLING, "content": None}, CALLING),
        ({**CALLING, "tool_calls": [{**CALL, "index": 0}]}, CALLING),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            CALLING,
        ),
        (
            OpenAIMessage(role="assistant", tool_calls=[CALL]),
            CALLING,
        ),
        (ParsedChatCompletionMessage[None](role="assistant", content="Hi"), PLAIN),
        (
            ParsedChatCompletionMessage[None](role="assistant", tool_calls=[PARSED_CALL]),
            CALLING,
        ),
        ({"role": "assistant", "tool_calls": [PARSED_CALL]}, CALLING),
        ({**VLLM, "reasoning_content": ""}, {**REASONED, "tool_calls": []}),
        (
            {**PLAIN, "stop_reason": None, "token_ids": None, "extra": {"a": [], "b": ""}},
            PLAIN,
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        **CALL,
                        "type": None,
                        "caller": None,
                        "extra": {},
                        "function": {**CALL["function"], "provider_specific_fields": None},
                    }
                ],
            },
            CALLING,
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "Hi", "image_url": None}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
        ),
    ],
    ids=[
        "openai's message.model_dump()",
        "openai's message.to_dict()",
        "openai's message",
        "our message.model_dump()",
        "our to_dict()",
        "our message",
        "vllm",
        "litellm",
        "refusal",
        "refusal part",
        "content null",
        "content null beside calls",
        "index of a call",
        "arguments as an object",
        "openai's message with calls",
        "openai's parsed message",
        "openai's parsed message with calls",
        "openai's call in a dict",
        "reasoning beside an empty reasoning_content",
        "unknown null fields of a message",
        "unknown null fields of a call",
        "unknown null fields of a part",
    ],
)
def test_an_answer_is_taken_back_as_history(message: Any, plain: dict[str, Any]) -> None:
    sent = taken(message, HELLO)
    assert sent["messages"] == [HELLO, plain, HELLO]
    assert ChatRequest.parse(sent).to_dict() == sent
    assert request_hash(sent) == request_hash(taken(plain, HELLO))


def test_the_hash_of_a_request_stays_the_same() -> None:
    """Rows of earlier versions are found again by it."""
    sent = taken(
        {**CALLING, "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
        tools=[{"type": "function", "function": {"name": "f"}}],
        temperature=0,
        stop="x",
        seed=7,
        max_completion_tokens=9,
        logprobs=True,
        top_logprobs=0,
    )
    assert request_hash(sent) == "247ce85251ef1ebed2c1b2512fad0ae9596159519f6864408814754bb13c9df7"


def test_the_messages_of_the_caller_stay_as_they_are() -> None:
    messages: list[dict[str, Any]] = [
        HELLO,
        {**CALLING, "content": ["a"], "reasoning": "r", "refusal": None},
    ]
    before = copy.deepcopy(messages)
    ChatRequest(model="m", messages=messages)
    assert messages == before


@pytest.mark.parametrize("value", [b"x", {1}, object()], ids=["bytes", "set", "object"])
def test_arguments_that_are_not_json_are_refused(value: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": {"a": value}}}
    with pytest.raises(InvalidRequest) as caught:
        ChatRequest.parse({"model": "m", "messages": [{**CALLING, "tool_calls": [call]}]})
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"
    assert "can't be written as JSON" in caught.value.message


def test_parsed_copies_in_answers_are_ignored() -> None:
    call = {**CALL, "function": {**CALL["function"], "parsed_arguments": {"a": 1}}}
    sent, warning = warned({**PLAIN, "parsed": {"a": 1}, "tool_calls": [call]})
    assert sent["messages"][1] == {**PLAIN, "tool_calls": [CALL]}
    assert warning.endswith(
        "messages[1].parsed, messages[1].tool_calls[0].function.parsed_arguments"
    )


def test_our_answer_with_tool_calls_is_taken_back() -> None:
    call = ToolCall(id="call_1", function=FunctionCall(name="f", arguments='{"a": 1}'))
    answer = AssistantMessage(content=None, tool_calls=[call])
    assert taken(answer.model_dump())["messages"][1] == CALLING


@pytest.mark.parametrize("role", ["function", "ipython", "tool"])
def test_results_of_tools_are_taken_under_each_name(role: str) -> None:
    result = {"role": role, "name": "f", "content": "4"}
    assert taken(CALLING, result)["messages"][2] == result
    empty = {"role": role, "name": "f", "content": None}
    assert taken(CALLING, empty)["messages"][2] == {"role": role, "name": "f"}


def test_fields_of_a_message_without_meaning_are_named_where_they_have_a_value() -> None:
    cached = {"type": "ephemeral"}
    sent, warning = warned(
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": cached}, "b"],
            "cache_control": cached,
        },
        {**PLAIN, "annotations": [{"type": "url_citation"}], "refusal": "Not that."},
        tools=[{"type": "function", "function": {"name": "f"}, "cache_control": cached}],
    )
    assert warning == (
        "fields without effect are ignored: messages[1].cache_control, "
        "messages[1].content[0].cache_control, messages[2].annotations, messages[2].refusal, "
        "tools[0].cache_control"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert sent["messages"][1:] == [{"role": "user", "content": parts}, PLAIN]
    assert sent["tools"] == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        (
            {**PLAIN, "audio": {"id": "audio_1"}},
            "messages[1].audio",
            "messages[1].audio is not supported: send its transcript as content",
        ),
        (
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            "messages[1].function_call",
            "former name of tool_calls",
        ),
        ({**PLAIN, "reasoning": "a", "reasoning_content": "b"}, "messages[1].reasoning", "differ"),
        ({**PLAIN, "prefix": True}, "messages[1].prefix", "unknown field 'messages[1].prefix'"),
        ({"role": "user", "content": None}, "messages[1]", "a user message needs content"),
    ],
    ids=["audio", "function_call", "reasoning", "prefix", "content"],
)
def test_what_would_change_the_answer_is_refused(
    message: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        taken(message)
    assert caught.value.param == param
    assert words in caught.value.message


def test_request_id_is_the_id_of_the_job() -> None:
    assert taken(request_id="r-1")["job"]["id"] == "r-1"
    both = taken(request_id="r-1", job={"id": "r-1", "run": "a"})["job"]
    assert (both["id"], both["run"]) == ("r-1", "a")
    for fields, words in (
        ({"request_id": "a b"}, "request_id: must have only letters, digits, '_' and '-'"),
        ({"request_id": "a", "job": {"id": "b"}}, "request_id and job.id differ"),
    ):
        with pytest.raises(InvalidRequest, match=words) as caught:
            taken(**fields)
        assert caught.value.param == "request_id"
