"""Prompts, compared with those that transformers renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from jobs import ChatRequest, JobError
from tests.worker.prompt.requests import (
    AGAIN,
    ANSWER,
    CALL,
    HELLO,
    INLINE,
    RESULT,
    SYSTEM,
    THOUGHT,
    TOOLS,
    builder,
    expected,
    rendered,
    request,
    save,
)
from tests.worker.sources import open_folder, read_tokenizer
from tests.worker.templates import CHATML, GEMMA, LLAMA2, LLAMA3, QWEN_TEMPLATE, TEMPLATES
from tests.worker.tokenizers import STYLES, Style
from worker.checkpoint.tokenizer import Tokenizer
from worker.prompt.template import ChatTemplate, end_of_turn

# --- compared with transformers -------------------------------------------------------------------

PLAIN = {
    "one turn": request(HELLO),
    "system": request(SYSTEM, HELLO),
    "several turns": request(SYSTEM, HELLO, ANSWER, AGAIN),
}
TOOL_USE = {
    "tools offered": request(SYSTEM, HELLO, tools=TOOLS),
    "tool called": request(SYSTEM, HELLO, CALL, RESULT, tools=TOOLS),
    "tool called, then asked again": request(HELLO, CALL, RESULT, ANSWER, AGAIN, tools=TOOLS),
}
THINKING = {
    "reasoning of an earlier turn": request(HELLO, THOUGHT, AGAIN),
    "reasoning in the text": request(HELLO, INLINE, AGAIN),
    "reasoning in the present turn": request(HELLO, CALL | THOUGHT, RESULT, tools=TOOLS),
    "no thinking": request(HELLO, chat_template_kwargs={"enable_thinking": False}),
    "thinking": request(HELLO, chat_template_kwargs={"enable_thinking": True}),
}
CASES = [
    *(
        ("qwen", QWEN_TEMPLATE, name, case)
        for name, case in {**PLAIN, **TOOL_USE, **THINKING}.items()
    ),
    *(("qwen", CHATML, name, case) for name, case in PLAIN.items()),
    *(("llama3", LLAMA3, name, case) for name, case in {**PLAIN, **TOOL_USE}.items()),
    *(("llama2", LLAMA2, name, case) for name, case in PLAIN.items()),
    *(("gemma", GEMMA, name, case) for name, case in PLAIN.items()),
    (
        "llama3",
        LLAMA3,
        "given date",
        request(HELLO, chat_template_kwargs={"date_string": "1 Jan 2000"}),
    ),
]


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("style", "source", "wanted"),
    [
        pytest.param(style, source, case, id=f"{style}-{name}")
        for style, source, name, case in CASES
    ],
)
def test_a_prompt_equals_that_of_transformers(
    tmp_path: Path, style: Style, source: str, wanted: ChatRequest
) -> None:
    folder = save(tmp_path, style, source)
    build = builder(folder).build
    before, theirs, after = build(wanted), expected(folder, wanted), build(wanted)
    assert theirs in (before.text, after.text)  # the date may change in between
    assert after.token_ids == read_tokenizer(folder).encode(after.text)


@pytest.mark.oracle
@pytest.mark.parametrize("style", STYLES)
def test_the_bos_token_occurs_once(tmp_path: Path, style: Style) -> None:
    folder = save(tmp_path, style, TEMPLATES[style])
    ids = builder(folder).build(request(HELLO)).token_ids
    begin = open_folder(folder).special_tokens.get("bos_token")
    if begin is None:
        return
    assert ids.count(read_tokenizer(folder).id_of(begin) or -1) == 1


@pytest.mark.oracle
@pytest.mark.parametrize("style", STYLES)
def test_a_text_without_the_chat_template_has_the_tokens_of_transformers(
    tmp_path: Path, style: Style
) -> None:
    folder = save(tmp_path, style, TEMPLATES[style])
    theirs, build = AutoTokenizer.from_pretrained(folder), builder(folder).build
    text = " Hello, 你好 🎉 \n"
    assert build(request(HELLO, apply_chat_template=False)).token_ids == theirs.encode(text)
    bare = build(request(HELLO, apply_chat_template=False, add_special_tokens=False))
    assert bare.token_ids == theirs.encode(text, add_special_tokens=False)
    cut = build(request(HELLO, apply_chat_template=False, truncate_prompt_tokens=3))
    assert cut.token_ids == theirs.encode(text)[-3:]
    # They begin a rendered prompt only if asked, and then once.
    templated = build(request(HELLO, add_special_tokens=True))
    begin = theirs.encode("a")[: -len(theirs.encode("a", add_special_tokens=False))]
    rest = build(request(HELLO)).token_ids
    assert templated.token_ids == (rest if rest[: len(begin)] == begin else [*begin, *rest])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"continue_final_message": True},
        {"chat_template_kwargs": {"a": 1}},
        {"job": {"session": "s"}},
    ],
)
def test_a_field_of_the_chat_template_is_refused_without_it(fields: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="chat template"):
        request(HELLO, apply_chat_template=False, **fields)


@pytest.mark.parametrize("style", ["llama2", "gemma"])
def test_wrong_turns_are_refused_with_the_message_of_the_template(
    tmp_path: Path, style: Style
) -> None:
    build = builder(save(tmp_path, style, TEMPLATES[style])).build
    with pytest.raises(JobError) as caught:
        build(request(HELLO, AGAIN))
    assert caught.value.code == "invalid_request"
    assert caught.value.param == "messages"
    assert caught.value.message.startswith("the model's chat template refuses: ")
    assert "must alternate" in caught.value.message


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("trimmed", [True, False])
def test_the_token_that_ends_an_assistant_turn_is_found(
    tmp_path: Path, style: Style, trimmed: bool
) -> None:
    ends = {
        "llama2": "</s>",
        "llama3": "<|eot_id|>",
        "qwen": "<|im_end|>",
        "gemma": "<end_of_turn>",
    }
    source = TEMPLATES[style] if trimmed else TEMPLATES[style].replace("| trim", "")
    save(tmp_path, style, source)
    model = open_folder(tmp_path)
    tokenizer, found = model.tokenizer, ChatTemplate.of(model)
    assert found is not None
    assert end_of_turn(found, tokenizer) == tokenizer.id_of(ends[style])


@pytest.mark.parametrize(
    "source", ["{{ messages[-1].content }} end", "{{ raise_exception('no') }}"]
)
def test_a_template_without_an_end_of_turn_has_none(tmp_path: Path, source: str) -> None:
    save(tmp_path, "qwen", source)
    model = open_folder(tmp_path)
    tokenizer, found = model.tokenizer, ChatTemplate.of(model)
    assert found is not None
    assert end_of_turn(found, tokenizer) is None


# --- refused --------------------------------------------------------------------------------------


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    """JSON can encode one; tokenizers reject it."""
    with pytest.raises(JobError) as caught:
        request({"role": "user", "content": "a\ud83d"})
    assert caught.value.param == "messages[0].content"
    assert "\\ud83d at 1 is a lone surrogate" in caught.value.message
    wanted = request(HELLO, chat_template_kwargs={"name": "\ud83d"})
    with pytest.raises(JobError) as caught:
        rendered("{{ name }}", wanted, tmp_path)
    assert caught.value.code == "invalid_request"
    assert "lone surrogate" in caught.value.message


@pytest.mark.parametrize("source", ["{# nothing #}", "{{ messages[0].content }}"])
def test_a_prompt_of_no_tokens_is_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(JobError) as caught:
        rendered(source, request({"role": "user", "content": ""}), tmp_path)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")
    assert caught.value.message.startswith("the prompt has no tokens")
    assert not caught.value.retryable


def test_a_prompt_must_leave_room_in_the_context(tmp_path: Path) -> None:
    folder = save(tmp_path, "qwen", CHATML)
    count = len(builder(folder).build(request(HELLO)).token_ids)
    assert builder(folder, count + 1).build(request(HELLO)).token_ids
    with pytest.raises(JobError) as caught:
        builder(folder, count).build(request(HELLO))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert caught.value.message == (
        f"the prompt has {count} tokens and the context holds {count}, completion included: "
        "shorten the messages or use a model with a longer context"
    )


def test_a_far_too_long_prompt_is_refused_before_it_is_tokenized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = builder(save(tmp_path, "qwen", CHATML), context=64).build
    monkeypatch.setattr(Tokenizer, "encode", None)
    with pytest.raises(JobError) as caught:
        build(request({"role": "user", "content": "the answer " * 10_000}))
    assert caught.value.code == "context_length_exceeded"
    assert "characters" in caught.value.message
