"""A chat template that the user gives in a file: what is refused when the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs import JobError
from tests.worker.sources import open_folder
from tests.worker.templates import CHATML
from tests.worker.tokenizers import save_tokenizer
from worker.prompt import sandbox
from worker.prompt.template import ChatTemplate, template_path

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
LIMITS = "exceeds the limits of the sandbox: "


def load(folder: Path, text: str) -> ChatTemplate:
    save_tokenizer(folder, "qwen")
    file = folder / "given.jinja"
    file.write_text(text, encoding="utf-8")
    return ChatTemplate.from_file(file, open_folder(folder))


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (LOOP, LIMITS),
        (LOOP.replace("x", ""), LIMITS + "it was stopped after 0.2 s"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", LIMITS + "it recurses"),
        ("{{ 'a' * 10**10 }}", LIMITS + "it takes too much memory"),
        ("{{ ''.__class__.__mro__ }}", "is blocked by the sandbox: "),
        ("{% if", "is not valid Jinja"),
        ("", "is empty"),
        (" \n", "is empty"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, fact: str
) -> None:
    monkeypatch.setattr(sandbox, "RENDER_SECONDS", 0.2)
    with pytest.raises(JobError) as caught:
        load(tmp_path, text)
    error = caught.value
    assert (error.code, error.param) == ("invalid_request", "chat_template")
    assert error.message.startswith(f"chat template {tmp_path / 'given.jinja'} {fact}")
    assert "\n" not in error.message
    assert len(error.message) < 500


def test_a_template_that_refuses_some_messages_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, CHATML).takes_tools is False
    assert load(tmp_path, "{{ raise_exception('tools only') }}").source


@pytest.mark.parametrize(
    "given", ["", " ", "{% if messages %}", "{{ messages }}", "x" * 5000, "a\nb", CHATML]
)
def test_the_text_of_a_template_is_no_path(given: str) -> None:
    with pytest.raises(JobError) as caught:
        template_path(given)
    assert caught.value.message.startswith(
        "chat_template must be the path of a file with a Jinja template, got "
    )
    assert len(caught.value.message) < 200
    assert caught.value.param == "chat_template"
    assert template_path("a/b.jinja") == Path("a/b.jinja")


def test_a_path_on_the_command_line_is_checked_too(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen")
    with pytest.raises(JobError, match="must be the path of a file"):
        ChatTemplate.from_file(Path("{% if messages %}"), open_folder(tmp_path))
