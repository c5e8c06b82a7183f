"""Where chat templates and their special tokens come from, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import JobError
from tests.worker.prompt.requests import (
    HELLO,
    TOOLS,
    builder,
    expected,
    rendered,
    request,
    save,
    template,
)
from tests.worker.sources import open_folder
from tests.worker.templates import CHATML
from tests.worker.tokenizers import save_tokenizer
from worker.prompt.builder import PromptBuilder
from worker.prompt.template import ChatTemplate


def test_a_model_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen")
    with pytest.raises(JobError) as caught:
        builder(tmp_path).build(request(HELLO))
    assert caught.value.code == "unsupported_model"
    assert caught.value.message == (
        "model org/m has no chat template: use a chat (instruct) checkpoint, put a "
        "chat_template.jinja into its folder, or start it with --chat-template FILE"
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
