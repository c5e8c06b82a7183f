"""Prompts, compared with those that transformers renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from jobs import ChatRequest, JobError
from tests.worker.sources import open_folder, read_tokenizer
from tests.worker.templates import CHATML, GEMMA, LLAMA2, LLAMA3, QWEN_TEMPLATE, TEMPLATES
from tests.worker.tokenizers import STYLES, Style, save_tokenizer
from worker.loading.tokenizer import Tokenizer
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate, end_of_turn

SYSTEM = {"role": "system", "content": "Answer briefly.  Größe & <b>Ordnung</b>!"}
HELLO = {"role": "user", "content": " Hello, 你好 🎉 \n"}
ANSWER = {"role": "assistant", "content": "Hi there."}
AGAIN = {"role": "user", "content": "And 2 + 3?"}
THOUGHT = {"role": "assistant", "content": "Hi.", "reasoning_content": "\nGreet back.\n"}
INLINE = {"role": "assistant", "content": "<think>\nGreet.\n</think>\n\nHi."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {
                "name": "weather",
                "arguments": '{"city": "Köln", "days": [1, 2.5, null]}',
            },
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"rain": true}'}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <soon> in a city's centre",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "default": None}},
                "required": ["city"],
            },
        },
    }
]


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=list(messages), **fields)


def builder(folder: Path, context: int = 4096) -> PromptBuilder:
    source = open_folder(folder)
    return PromptBuilder(source.name, source.tokenizer, ChatTemplate.of(source), context)


def expected(folder: Path, wanted: ChatRequest) -> str:
    """The prompt that transformers renders for the same request."""
    messages = []
    for message in wanted.messages:
        plain = message.to_dict()
        for call in plain.get("tool_calls", []):  # its documentation asks for objects here
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        messages.append(plain)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    text: str = theirs.apply_chat_template(
        messages,
        tools=[tool.to_dict() for tool in wanted.tools] if wanted.tools else None,
        tokenize=False,
        add_generation_prompt=True,
        **(wanted.chat_template_kwargs or {}),
    )
    return text


def save(folder: Path, style: Style, template: Any) -> Path:
    save_tokenizer(folder, style, template)
    return folder


def template(source: str, **others: str) -> ChatTemplate:
    return ChatTemplate({"default": source, **others}, {"eos_token": "</s>"})


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


# --- variables of the template --------------------------------------------------------------------


def rendered(source: str, wanted: ChatRequest, folder: Path) -> str:
    return builder(save(folder, "qwen", source)).build(wanted).text


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


@pytest.mark.parametrize(
    ("field", "value", "fact"),
    [
        (
            "response_format",
            {"type": "json_object"},
            "response_format json_object is not supported",
        ),
        ("tool_choice", "required", "tool_choice 'required' is not supported"),
        (
            "tool_choice",
            {"type": "function", "function": {"name": "weather"}},
            "tool_choice {'type': 'function', 'function': {'name': 'weather'}} is not supported",
        ),
    ],
)
def test_constrained_output_is_refused_by_name(
    tmp_path: Path, field: str, value: Any, fact: str
) -> None:
    with pytest.raises(JobError) as caught:
        rendered(CHATML, request(HELLO, tools=TOOLS, **{field: value}), tmp_path)
    assert (caught.value.code, caught.value.param) == ("invalid_request", field)
    assert caught.value.message.startswith(fact)


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


# --- sources of templates -------------------------------------------------------------------------


def test_a_model_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen")
    with pytest.raises(JobError) as caught:
        builder(tmp_path).build(request(HELLO))
    assert caught.value.code == "unsupported_model"
    assert caught.value.message == (
        "model org/m has no chat template: use a chat (instruct) checkpoint, or put a "
        "chat_template.jinja into its folder"
    )


def named(**sources: str) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in sources.items()]


@pytest.mark.oracle
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
@pytest.mark.parametrize(
    ("in_config", "in_files"),
    [
        ("config", {}),
        (named(default="config", tool_use="config tools"), {}),
        ("config", {"chat_template.jinja": "file"}),
        (named(default="config", tool_use="config tools"), {"chat_template.jinja": "file"}),
        (
            "config",
            {
                "chat_template.jinja": "file",
                "additional_chat_templates/tool_use.jinja": "file tools",
                "additional_chat_templates/rag.jinja": "file rag",
            },
        ),
        ("config", {"chat_template.json": '{"chat_template": "legacy"}'}),
    ],
)
def test_template_files_have_the_precedence_of_transformers(
    tmp_path: Path, in_config: Any, in_files: dict[str, str], tools: Any
) -> None:
    save(tmp_path, "qwen", in_config)
    for name, source in in_files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source, encoding="utf-8")
    wanted = request(HELLO, tools=tools)
    model = open_folder(tmp_path)
    own = PromptBuilder("m", model.tokenizer, ChatTemplate.of(model), 4096, hides_tools=True)
    assert own.build(wanted).text == expected(tmp_path, wanted)


def test_tools_that_the_template_ignores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the chat template of model org/m ignores them") as caught:
        rendered(CHATML, request(HELLO, tools=TOOLS), tmp_path)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "tools")
    hidden = request(HELLO, tools=TOOLS, tool_choice="none")
    assert rendered(CHATML, hidden, tmp_path) == expected(tmp_path, request(HELLO))


def test_the_legacy_file_is_used_if_there_is_no_other(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "legacy"}', encoding="utf-8")
    assert builder(tmp_path).build(request(HELLO)).text == "legacy"


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    save(tmp_path, "qwen", named(rag="rag", tool_use="tools"))
    assert builder(tmp_path).build(request(HELLO, tools=TOOLS)).text == "tools"
    with pytest.raises(JobError, match="chat templates for rag, tool_use and no default one"):
        builder(tmp_path).build(request(HELLO))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("in_config", "in_map"),
    [
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>"}}),
        ({"bos_token": "<s>"}, {"bos_token": "</s>"}),
        ({"bos_token": "<s>", "added_tokens_decoder": {}}, {"bos_token": "</s>"}),
        ({"mask_token": "</s>", "extra_special_tokens": {"image_token": "<unk>"}}, None),
    ],
)
def test_special_tokens_equal_those_of_transformers(
    tmp_path: Path, in_config: dict[str, Any], in_map: dict[str, Any] | None
) -> None:
    names = ("bos_token", "eos_token", "mask_token", "image_token")
    template = "|".join(f"{{{{ {name} }}}}" for name in names)
    save_tokenizer(tmp_path, "llama2")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **in_config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if in_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(in_map), encoding="utf-8")
    wanted = request(HELLO)
    assert builder(tmp_path).build(wanted).text == expected(tmp_path, wanted)


@pytest.mark.parametrize(
    "value", [3, {"default": "x"}, [{"name": "default"}], ["x"], [{"name": 1}]]
)
def test_a_template_of_the_wrong_type_is_named(tmp_path: Path, value: Any) -> None:
    save(tmp_path, "qwen", value)
    with pytest.raises(JobError) as caught:
        builder(tmp_path)
    assert caught.value.code == "unsupported_model"
    assert str(tmp_path / "tokenizer_config.json") in caught.value.message


def test_a_template_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError) as caught:
        builder(tmp_path)
    assert str(tmp_path / "chat_template.jinja") in caught.value.message


def test_the_hash_covers_every_named_template() -> None:
    assert template("a", tool_use="b").hash != template("a", tool_use="c").hash
    assert template("a", tool_use="b").hash == template("a", tool_use="b").hash
