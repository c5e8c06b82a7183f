"""vLLM's fields for the prompt: the continued message, thinking, truncation; the roles of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jobs import ChatRequest, JobError
from tests.worker.sources import open_folder
from tests.worker.templates import CHATML, LLAMA3, QWEN_TEMPLATE, TEMPLATES
from tests.worker.tokenizers import STYLES, Style, save_tokenizer
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate

HELLO = {"role": "user", "content": "Hello"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def builder(folder: Path, source: str, style: Style = "qwen", context: int = 4096) -> PromptBuilder:
    save_tokenizer(folder, style, source)
    model = open_folder(folder)
    return PromptBuilder(model.name, model.tokenizer, ChatTemplate.of(model), context)


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=list(messages), **fields)


def refusal(build: PromptBuilder, wanted: ChatRequest) -> JobError:
    with pytest.raises(JobError) as caught:
        build.build(wanted)
    assert caught.value.code == "invalid_request"
    return caught.value


@pytest.mark.oracle
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", " 4\n2"])
@pytest.mark.parametrize("style", STYLES)
def test_a_continued_message_is_open_as_with_transformers(
    folder: Path, style: Style, text: str
) -> None:
    messages = [HELLO, {"role": "assistant", "content": text}]
    build = builder(folder, TEMPLATES[style], style)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        messages, tokenize=False, continue_final_message=True
    )
    assert build.build(request(*messages, continue_final_message=True)).text == theirs
    parts = [{"type": "text", "text": text}]
    as_parts = request(HELLO, {"role": "assistant", "content": parts}, continue_final_message=True)
    assert build.build(as_parts).text == theirs


@pytest.mark.parametrize(
    ("source", "last"),
    [
        (CHATML, {"role": "assistant", "content": " "}),
        (CHATML, {"role": "assistant"}),
        (CHATML, CALL),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", {"role": "user", "content": "Hi"}),
        ("{{ messages[-1].content | upper }}", {"role": "user", "content": "Hi"}),
    ],
    ids=["blank", "none", "calls", "left out", "changed"],
)
def test_a_message_that_cannot_be_continued_is_refused(
    folder: Path, source: str, last: dict[str, Any]
) -> None:
    wanted = request(HELLO, last, continue_final_message=True)
    assert refusal(builder(folder, source), wanted).param == "continue_final_message"


def test_the_generation_prompt_can_be_left_out(folder: Path) -> None:
    build = builder(folder, CHATML)
    whole = build.build(request(HELLO, add_generation_prompt=True)).text
    assert build.build(request(HELLO)).text == whole
    without = build.build(request(HELLO, add_generation_prompt=False)).text
    assert whole == without + "<|im_start|>assistant\n"
    with pytest.raises(JobError, match="exclude each other"):
        request(HELLO, add_generation_prompt=True, continue_final_message=True)


def test_enable_thinking_is_the_templates_variable(folder: Path) -> None:
    build = builder(folder, QWEN_TEMPLATE)
    for value in (True, False):
        expected = build.build(request(HELLO, chat_template_kwargs={"enable_thinking": value}))
        assert build.build(request(HELLO, enable_thinking=value)) == expected
    off = build.build(request(HELLO, enable_thinking=False))
    assert off != build.build(request(HELLO))
    assert build.build(request(HELLO, reasoning_effort="none")) == off
    assert build.build(request(HELLO, reasoning_effort="high")) == build.build(request(HELLO))
    both = request(HELLO, enable_thinking=True, chat_template_kwargs={"enable_thinking": False})
    assert "differ: set only one" in refusal(build, both).message


def test_reasoning_effort_is_the_templates_variable(folder: Path) -> None:
    build = builder(folder, "{{ reasoning_effort }} {{ enable_thinking is defined }}")
    assert build.build(request(HELLO, reasoning_effort="low")).text == "low False"
    known = builder(folder, "{{ reasoning_effort }}")
    assert known.build(request(HELLO, reasoning_effort="none")).text == "none"


@pytest.mark.parametrize(
    ("source", "fields", "param"),
    [
        (CHATML, {"enable_thinking": True}, "enable_thinking"),
        (CHATML, {"enable_thinking": False}, None),
        (CHATML, {"reasoning_effort": "none"}, None),
        (CHATML + "<think>", {"enable_thinking": False}, "enable_thinking"),
        (CHATML + "<think>", {"reasoning_effort": "none"}, "reasoning_effort"),
        (CHATML + "<think>", {"reasoning_effort": "low"}, None),
    ],
)
def test_thinking_that_cannot_be_switched_is_refused(
    folder: Path, source: str, fields: dict[str, Any], param: str | None
) -> None:
    build, wanted = builder(folder, source), request(HELLO, **fields)
    if param is None:
        assert build.build(wanted) == build.build(request(HELLO))
    else:
        assert refusal(build, wanted).param == param


@pytest.mark.parametrize("last", [1, 5, 10_000])
def test_a_prompt_is_truncated_to_its_last_tokens(folder: Path, last: int) -> None:
    build = builder(folder, CHATML)
    whole = build.build(request(HELLO)).token_ids
    assert build.build(request(HELLO, truncate_prompt_tokens=last)).token_ids == whole[-last:]


def test_a_prompt_longer_than_the_context_can_be_truncated_to_it(folder: Path) -> None:
    long = {"role": "user", "content": "one two three " * 20}
    build = builder(folder, CHATML, context=64)
    with pytest.raises(JobError, match="shorten the messages"):
        build.build(request(long))
    whole = builder(folder, CHATML).build(request(long)).token_ids
    assert len(whole) > 64
    assert build.build(request(long, truncate_prompt_tokens=10)).token_ids == whole[-10:]
    assert build.build(request(long, truncate_prompt_tokens=-1)).token_ids == whole[-63:]
    wanted = request(long, truncate_prompt_tokens=-1, max_tokens=14)
    assert build.build(wanted).token_ids == whole[-50:]
    with pytest.raises(JobError, match="truncate_prompt_tokens: must be at least 1"):
        request(long, truncate_prompt_tokens=0)


@pytest.mark.parametrize("role", ["function", "ipython"])
@pytest.mark.parametrize(("style", "source"), [("qwen", QWEN_TEMPLATE), ("llama3", LLAMA3)])
def test_other_names_of_the_tool_role_are_rendered_as_tool(
    folder: Path, role: str, style: Style, source: str
) -> None:
    build = builder(folder, source, style)
    texts = {
        build.build(request(HELLO, CALL, {"role": name, "name": "f", "content": "4"})).text
        for name in (role, "tool")
    }
    assert len(texts) == 1


def test_a_template_that_knows_no_tools_gets_the_role_as_it_is(folder: Path) -> None:
    build = builder(folder, CHATML)
    for role in ("function", "ipython"):
        assert f"<|im_start|>{role}" in build.build(request(HELLO, {"role": role})).text


def test_content_null_is_empty_text_unless_there_are_calls(folder: Path) -> None:
    build = builder(folder, CHATML)
    null = request(HELLO, {"role": "assistant", "content": None}, HELLO)
    empty = request(HELLO, {"role": "assistant", "content": ""}, HELLO)
    assert build.build(null) == build.build(empty)


@pytest.mark.parametrize(("session", "named"), [("s", True), (None, False)])
def test_a_session_over_the_context_says_what_leaves_turns_out(
    folder: Path, session: str | None, named: bool
) -> None:
    long = {"role": "user", "content": "one two three " * 20}
    with pytest.raises(JobError, match="use a model with a longer context") as caught:
        builder(folder, CHATML, context=64).build(request(long, job={"session": session}))
    assert caught.value.code == "context_length_exceeded"
    assert ('truncate="oldest"' in caught.value.message) is named
