"""docs/requests.md lists every field of a request, and each behaves as the page says."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
from openai.resources.chat.completions import Completions
from openai.types.chat import ChatCompletionMessage, ChatCompletionStreamOptionsParam

from jobs.api.message import Message
from jobs.api.request import ChatRequest, IgnoredFieldWarning
from jobs.api.structured import FORMER_NAMES
from jobs.api.unsupported_fields import (
    IGNORED_FIELDS,
    IGNORED_IN_CALL,
    IGNORED_IN_FUNCTION,
    IGNORED_IN_MESSAGE,
    IGNORED_IN_PART,
    IGNORED_IN_TOOL,
    REFUSED_FIELDS,
)
from jobs.errors import InvalidRequest

PAGE = (Path(__file__).parents[3] / "docs" / "requests.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| `(?P<field>\w+)` \| (?P<state>\w+) \| `(?P<example>.+?)` \| "
    r"(?:`(?P<neutral>.+?)` )?\|(?: .+)? \|$"
)
NO_WIRE = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}  # of the SDK's call
# vLLM's extensions of OpenAI's request, in its server and in its SamplingParams.
VLLM_FIELDS = set(
    re.findall(
        r"\w+",
        """
        best_of use_beam_search top_k min_p repetition_penalty length_penalty early_stopping
        stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids
        bad_words echo add_generation_prompt continue_final_message add_special_tokens documents
        chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs guided_json
        guided_regex guided_choice guided_grammar guided_decoding_backend
        guided_whitespace_pattern structural_tag structured_outputs priority request_id
        logits_processors return_tokens_as_token_ids return_token_ids cache_salt
        kv_transfer_params vllm_xargs include_reasoning reasoning_effort thinking_token_budget
        """,
    )
)
USER = {"role": "user", "content": "hi"}
BASE: dict[str, Any] = {"model": "m", "messages": [USER]}
MOVED = {"max_completion_tokens": "max_tokens", "reasoning": "reasoning_content"}


class Field(NamedTuple):
    name: str
    state: str
    example: Any
    neutral: Any


def table(title: str) -> list[Field]:
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    rows = [ROW.match(line) for line in lines]
    assert lines and None not in rows, [line for line in lines if not ROW.match(line)]
    return [
        Field(
            row["field"],
            row["state"],
            json.loads(row["example"]),
            json.loads(row["neutral"] or "null"),
        )
        for row in rows
        if row
    ]


REQUEST, MESSAGE = table("Fields of a request"), table("Fields of a message")


def in_request(name: str, value: Any) -> dict[str, Any]:
    return {**BASE, **({"logprobs": True} if name == "top_logprobs" else {}), name: value}


def in_message(name: str, value: Any) -> dict[str, Any]:
    return {**BASE, "messages": [USER, {"role": "assistant", "content": "a", name: value}]}


CASES = [
    *(pytest.param(in_request, "", field, id=field.name) for field in REQUEST),
    *(
        pytest.param(in_message, "messages[1].", field, id=f"message.{field.name}")
        for field in MESSAGE
    ),
]


def sent(fields: dict[str, Any]) -> dict[str, Any]:
    """The request that is sent; a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ChatRequest(**fields).to_dict()


@pytest.mark.parametrize(("place", "path", "field"), CASES)
def test_a_field_behaves_as_the_page_says(place: Any, path: str, field: Field) -> None:
    fields = place(field.name, field.example)
    match field.state:
        case "done":
            request = sent(fields)
            found = request["messages"][1] if path else request
            if field.name == "request_id":
                assert request["job"]["id"] == field.example
            elif field.name == "guided_json":
                assert request["response_format"]["json_schema"]["schema"] == field.example
            elif field.name in FORMER_NAMES:
                key = FORMER_NAMES[field.name]
                assert request["structured_outputs"] == {key: field.example}
            else:
                value = found[MOVED.get(field.name, field.name)]
                known = value.items() >= field.example.items() if field.name == "job" else None
                assert known or value == field.example
            assert ChatRequest.parse(request).to_dict() == request
        case "ignored":
            with pytest.warns(IgnoredFieldWarning, match=re.escape(f"ignored: {path}{field.name}")):
                request = ChatRequest(**fields).to_dict()
            assert field.name not in (request["messages"][1] if path else request)
        case "refused":
            with pytest.raises(InvalidRequest, match="is not supported") as caught:
                sent(fields)
            assert caught.value.param == f"{path}{field.name}"
        case other:
            pytest.fail(f"unknown state {other}")


@pytest.mark.parametrize(("place", "path", "field"), CASES)
def test_null_empty_and_neutral_values_are_taken_silently(
    place: Any, path: str, field: Field
) -> None:
    if field.name in ("model", "messages", "role", "job"):
        return  # these can't be null
    values: list[Any] = [None]
    if field.state != "done":
        values += ["", [], {}] if field.neutral is None else [field.neutral]
    for value in values:
        request = sent(place(field.name, value))
        assert field.name not in (request["messages"][1] if path else request)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False},
        {"priority": 0},
        {"top_logprobs": 0},
        {"best_of": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"tools": [], "tool_choice": "none"},
        {"functions": [], "function_call": "none"},
        {"stop": []},
        {"web_search_options": {"user_location": None}},
        {"echo": 0, "use_beam_search": 0, "early_stopping": 0},
        {"include_reasoning": 1, "length_penalty": 1},
        {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}},
        {"stream_options": {"include_obfuscation": None, "continuous_usage_stats": None}},
    ],
    ids=str,
)
def test_neutral_values_of_clients_are_taken(fields: dict[str, Any]) -> None:
    sent({**BASE, **fields})


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("echo", 1), ("priority", False)])
def test_a_neutral_value_of_another_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sent({**BASE, name: value})
    assert caught.value.param == name


def test_stream_options_of_official_clients() -> None:
    with pytest.warns(IgnoredFieldWarning, match="ignored: stream_options.include_obfuscation"):
        options = {"include_usage": True, "include_obfuscation": True}
        request = ChatRequest(**BASE, stream_options=options).to_dict()
    assert request["stream_options"] == {"include_usage": True}
    with pytest.raises(InvalidRequest, match="is not supported") as caught:
        sent({**BASE, "stream_options": {"continuous_usage_stats": True}})
    assert caught.value.param == "stream_options.continuous_usage_stats"
    theirs = get_type_hints(ChatCompletionStreamOptionsParam)
    for name in (*theirs, "continuous_usage_stats"):
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE


def test_the_page_names_the_ignored_fields_of_parts_calls_and_tools() -> None:
    for name in IGNORED_IN_PART | IGNORED_IN_CALL | IGNORED_IN_FUNCTION | IGNORED_IN_TOOL:
        assert f"`{name}`" in PAGE, name


def test_the_page_lists_every_field_once() -> None:
    named = [field.name for field in REQUEST]
    assert sorted(named) == sorted(
        {
            *ChatRequest.model_fields,
            *("request_id", *FORMER_NAMES),
            *IGNORED_FIELDS,
            *REFUSED_FIELDS,
        }
    )
    states = {field.name: field.state for field in REQUEST}
    assert {name for name, state in states.items() if state == "ignored"} == set(IGNORED_FIELDS)
    assert {name for name, state in states.items() if state == "refused"} == set(REFUSED_FIELDS)
    for field in REQUEST:
        if field.state != "done":
            known = IGNORED_FIELDS.get(field.name)
            neutral = REFUSED_FIELDS[field.name].neutral if field.state == "refused" else known
            assert field.neutral == neutral, field.name
    of_message = [field.name for field in MESSAGE]
    assert len(of_message) == len(set(of_message))
    assert set(of_message) >= {*Message.model_fields, *IGNORED_IN_MESSAGE}


def test_the_page_lists_every_field_of_openai_and_vllm() -> None:
    listed = {field.name for field in REQUEST}
    theirs = set(inspect.signature(Completions.create).parameters) - NO_WIRE
    assert sorted(theirs - listed) == []
    assert sorted(VLLM_FIELDS - listed) == []
    assert set(ChatCompletionMessage.model_fields) <= {field.name for field in MESSAGE}
