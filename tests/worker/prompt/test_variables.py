"""The variables that chat templates get: messages, tools, chat_template_kwargs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import JobError
from tests.worker.prompt.requests import (
    CALL,
    HELLO,
    RESULT,
    TOOLS,
    builder,
    expected,
    rendered,
    request,
    save,
)
from tests.worker.templates import CHATML, TEMPLATES


def test_content_parts_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "you"}]
    text = rendered(
        "{{ messages[0].content }}", request({"role": "user", "content": parts}), tmp_path
    )
    assert text == "Hello, you"


@pytest.mark.oracle
@pytest.mark.parametrize("parts", [["one"], [" a ", "\n b"]])
def test_templates_that_handle_content_parts_get_them(tmp_path: Path, parts: list[str]) -> None:
    """Gemma's template trims each part."""
    save(tmp_path, "gemma", TEMPLATES["gemma"])
    content = [{"type": "text", "text": text} for text in parts]
    wanted = request({"role": "system", "content": content}, {"role": "user", "content": content})
    assert builder(tmp_path).build(wanted).text == expected(tmp_path, wanted)


def test_the_developer_role_is_rendered_as_system(tmp_path: Path) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert rendered("{{ messages[0].role }}", request(developer, HELLO), tmp_path) == "system"


def test_absent_fields_are_absent_not_null(tmp_path: Path) -> None:
    source = "{{ 'content' in messages[1] }} {{ 'tool_calls' in messages[0] }} {{ tools is none }}"
    assert rendered(source, request(HELLO, CALL, RESULT), tmp_path) == "False False True"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', "1"),
        ("", "none"),
        ('{"b": 1}', "none"),
        ("{not json", "text"),
        ("[" * 9999, "text"),
    ],
)
def test_arguments_of_a_tool_call_are_an_object_where_they_are_json(
    tmp_path: Path, arguments: str, shown: str
) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    source = (
        "{% set a = messages[1].tool_calls[0].function.arguments %}"
        "{{ 'text' if a is string else a.a if a.a is defined else 'none' }}"
    )
    assert rendered(source, request(HELLO, call), tmp_path) == shown


def test_tool_choice_none_hides_the_tools(tmp_path: Path) -> None:
    wanted = request(HELLO, tools=TOOLS, tool_choice="none")
    assert rendered("{{ tools is none }}", wanted, tmp_path) == "True"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_chat_template_kwargs_cannot_replace_fields_of_the_request(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(JobError) as caught:
        rendered(CHATML, request(HELLO, chat_template_kwargs={name: []}), tmp_path)
    assert caught.value.code == "invalid_request"
    assert caught.value.param == "chat_template_kwargs"
    assert caught.value.message == f"chat_template_kwargs can't set {name}"


@pytest.mark.parametrize(
    "name", ["self", "variables", "context", "caller", "not a name", "__class__"]
)
def test_chat_template_kwargs_may_have_any_other_name(tmp_path: Path, name: str) -> None:
    wanted = request(HELLO, chat_template_kwargs={name: 1})
    assert rendered("{{ messages[0].content }}", wanted, tmp_path) == HELLO["content"]


def test_documents_are_shown_by_a_template_that_uses_them_and_refused_by_others(
    tmp_path: Path,
) -> None:
    documents = [{"title": "t", "text": "a"}]
    source = "{% for one in documents or [] %}{{ one.title }}: {{ one.text }}{% endfor %}|"
    assert rendered(source, request(HELLO, documents=documents), tmp_path) == "t: a|"
    assert rendered(source, request(HELLO), tmp_path) == "|"
    with pytest.raises(JobError, match="documents: the model's chat template has none") as refused:
        rendered("{{ messages[0].content }}", request(HELLO, documents=documents), tmp_path)
    assert refused.value.param == "documents"
