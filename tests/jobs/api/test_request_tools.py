"""The tools of a request: their names and number, and the numbers in their schemas."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import ChatRequest, JobError
from jobs.errors import InvalidRequest


def ask(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


def tool(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize("name", ["f", "get_weather", "mcp.files-read_2", "_", "9", "a" * 128])
def test_names_of_tools_are_taken(name: str) -> None:
    tools = ask(tools=[tool(name)]).tools
    assert tools is not None
    assert tools[0].function.name == name


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "a\n", "a\x00b", "é", "</tool_call>", "a" * 129, "a" * 100_000]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(tools=[tool("f"), tool(name)])
    assert caught.value.param == "tools[1].function.name"
    assert "must have 1 to 128 letters (a-z), digits, '_', '-' and '.', got" in str(caught.value)
    assert len(caught.value.message) < 200


def test_tools_of_one_name_are_refused() -> None:
    with pytest.raises(JobError, match="tools: two tools have the name 'f': rename one"):
        ask(tools=[tool("f"), tool("g"), tool("f")])


def test_the_number_of_tools_is_limited() -> None:
    assert ask(tools=[tool(f"f{i}") for i in range(1024)]).tools
    with pytest.raises(JobError, match="tools: a request has at most 1024 tools, got 1025"):
        ask(tools=[tool(f"f{i}") for i in range(1025)])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_must_be_finite(value: float) -> None:
    for field, given in (
        ("tools", [tool("f", parameters={"a": [value]})]),
        ("chat_template_kwargs", {"a": {"b": value}}),
    ):
        with pytest.raises(InvalidRequest, match="numbers must be finite") as caught:
            ask(**{field: given})
        assert caught.value.param == field
