"""The syntax of a model's tool calls, found by rendering its chat template."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from jobs import ChatRequest, JobError
from jobs.api.answer import AssistantMessage
from jobs.api.message import FunctionCall, ToolCall
from tests.worker.templates import (
    CHATML,
    GEMMA,
    GEMMA_TOOLS,
    LLAMA2,
    LLAMA3,
    QWEN_CODER,
    QWEN_TEMPLATE,
)
from worker.loading.tool_syntax import parser_maker, tool_syntax
from worker.prompt.template import ChatTemplate
from worker.prompt.template_inputs import messages_for
from worker.text.tool_call import Call

# As in the first template of Qwen3, which fails on a message without content.
STRICT = QWEN_TEMPLATE.replace(" if message.content is string else ''", "").replace(
    "{%- set reasoning = '' %}", "{%- set reasoning = message.content.strip()[:0] %}"
)
OTHER_SYNTAX = QWEN_TEMPLATE.replace("tool_call>", "invoke>")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "time")
]
QUESTION = {"role": "user", "content": "How is it in Rome?"}


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("source", "syntax"),
    [
        (QWEN_TEMPLATE, "hermes"),
        (STRICT, "hermes"),
        (QWEN_CODER, "qwen3_coder"),
        (LLAMA3, "llama3_json"),
        (GEMMA_TOOLS, "pythonic"),
        (OTHER_SYNTAX, None),
        (CHATML, None),
        (LLAMA2, None),
        (GEMMA, None),
    ],
    ids=["qwen", "strict", "coder", "llama3", "gemma-tools", "other", "chatml", "llama2", "gemma"],
)
def test_the_syntax_is_the_one_that_the_template_writes(source: str, syntax: str | None) -> None:
    found = template(source)
    assert tool_syntax(found, None, "m") == syntax
    assert found.takes_tools == (source not in (CHATML, LLAMA2, GEMMA))
    assert template(STRICT).calls_need_content
    assert not template(QWEN_TEMPLATE).calls_need_content


def test_a_template_for_tools_alone_takes_tools() -> None:
    assert tool_syntax(template(CHATML, tool_use=QWEN_TEMPLATE), None, "m") == "hermes"


def test_a_template_that_fails_on_the_probe_counts_as_taking_tools() -> None:
    source = "{% if tools %}{{ tools[0].function.extra.more }}{% endif %}" + CHATML
    assert template(source).takes_tools
    assert tool_syntax(template(source), None, "m") is None


@pytest.mark.parametrize(
    ("source", "chosen", "warning"),
    [
        (OTHER_SYNTAX, None, "writes calls in a syntax that is not known"),
        (CHATML, "hermes", "ignores tools"),
        (CHATML, None, None),
        (QWEN_TEMPLATE, "llama3_json", None),
    ],
)
def test_what_loading_warns_of(
    source: str, chosen: str | None, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert tool_syntax(template(source), chosen, "org/m") == chosen
    assert [str(warning) in record.getMessage() for record in caplog.records] == [True] * bool(
        warning
    )


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(JobError, match="one of hermes, llama3_json, pythonic, qwen3_coder, got"):
        tool_syntax(None, "mistral", "m")


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (QWEN_TEMPLATE, 2),
        (STRICT, 2),
        (QWEN_CODER, 2),
        (LLAMA3, 1),
        (GEMMA_TOOLS, 2),
    ],
    ids=["qwen", "strict", "coder", "llama3", "gemma-tools"],
)
@pytest.mark.parametrize("content", [None, "I look it up."])
def test_an_answer_with_calls_makes_the_round_trip(
    source: str, count: int, content: str | None
) -> None:
    """The template writes our own answer back as the model wrote it: the parser reads it again."""
    if content is not None and source in (LLAMA3, GEMMA_TOOLS):
        return  # they write calls alone
    used = template(source)
    calls = [Call("weather", '{"city": "São \\"Paulo\\""}'), Call("time", '{"city": "Rome"}')]
    calls = calls[:count]
    answer = AssistantMessage(
        content=content,
        tool_calls=[
            ToolCall(id=f"call_{name}", function=FunctionCall(name=name, arguments=arguments))
            for name, arguments in ((call.name, call.arguments) for call in calls)
        ],
    )
    for history in (answer, answer.model_dump(), answer.to_dict()):
        request = ChatRequest(model="m", messages=[QUESTION, history], tools=TOOLS)
        before, after = (
            used.render(messages, TOOLS, add_generation_prompt=generates)
            for messages, generates in (
                (messages_for(used, request)[:1], True),
                (messages_for(used, request), False),
            )
        )
        text = after.rpartition(str(QUESTION["content"]))[2]
        if source in (LLAMA3, GEMMA_TOOLS):
            assert after.startswith(before)
            text = after.removeprefix(before)
        parser = parser_maker(tool_syntax(used, None, "m"), request)()
        assert parser is not None
        shown, found = parser.push(text)
        more, rest = parser.flush()
        assert [(one.name, json.loads(one.arguments)) for one in found + rest] == [
            (one.name, json.loads(one.arguments)) for one in calls
        ]
        assert (content or "") in shown + more


@pytest.mark.parametrize(
    ("fields", "parses"),
    [
        ({"tools": TOOLS}, True),
        ({"tools": TOOLS, "tool_choice": "auto"}, True),
        ({"tools": TOOLS, "tool_choice": "none"}, False),
        ({"tools": []}, False),
        ({}, False),
    ],
)
def test_answers_are_parsed_where_tools_may_be_called(fields: dict[str, Any], parses: bool) -> None:
    request = ChatRequest(model="m", messages=[QUESTION], **fields)
    assert (parser_maker("hermes", request)() is not None) == parses
    assert parser_maker(None, request)() is None
