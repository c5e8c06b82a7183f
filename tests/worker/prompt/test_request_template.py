"""Chat templates that requests bring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.api.request import ChatRequest
from jobs.errors import InvalidRequest, JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.loading.find import find
from worker.prompt.builder import PromptBuilder
from worker.prompt.request_template import RequestTemplates
from worker.prompt.template import ChatTemplate

SIMPLE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"


def request(template: str | None, **fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return ChatRequest(**{"model": "m", "messages": messages, "chat_template": template, **fields})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def trusting(folder: Path) -> PromptBuilder:
    source = find(str(folder))
    own, requests = ChatTemplate.of(source), RequestTemplates(source.special_tokens)
    return PromptBuilder("m", source.tokenizer, own, 4096, of_requests=requests)


def refused(builder: PromptBuilder, template: str) -> JobError:
    with pytest.raises(InvalidRequest) as caught:
        builder.build(request(template))
    return caught.value


def test_the_template_of_a_request_takes_the_place_of_the_models(trusting: PromptBuilder) -> None:
    assert trusting.build(request(SIMPLE)).text == "[user] hi\n"
    assert trusting.build(request(None)).text != "[user] hi\n"
    variables = request("{{ tone }}: {{ messages[0].content }}", chat_template_kwargs={"tone": "x"})
    assert trusting.build(variables).text == "x: hi"


def test_a_model_without_a_template_answers_with_that_of_a_request(folder: Path) -> None:
    source = find(str(folder))
    builder = PromptBuilder(
        "m", source.tokenizer, None, 4096, of_requests=RequestTemplates(source.special_tokens)
    )
    assert builder.build(request(SIMPLE)).text == "[user] hi\n"
    with pytest.raises(JobError, match="has no chat template"):
        builder.build(request(None))


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("a\n{% if", "is not valid Jinja (TemplateSyntaxError: "),
        ("a\n{% if", "(line 2)"),
        ("a\nb\n{{ 1 / 0 }}", "fails on these messages: division by zero (line 3)"),
        ("{{ raise_exception('no') }}", "refuses: no"),
        ("{{ messages.__class__.__base__ }}", "is blocked by the sandbox: "),
        ("{{ 'x' * 10**11 }}", "exceeds the limits of the sandbox: "),
    ],
)
def test_a_fault_of_the_template_is_one_of_the_request(
    trusting: PromptBuilder, template: str, fact: str
) -> None:
    error = refused(trusting, template)
    assert error.message.startswith("the request's chat_template ")
    assert fact in error.message
    assert trusting.build(request(None)).text


@pytest.mark.parametrize(
    ("fields", "fact"),
    [
        ({"chat_template": " \n"}, "chat_template: it is empty"),
        ({"chat_template": "x" * 65_537}, "chat_template: it has 65537 characters"),
        ({"chat_template": "x", "apply_chat_template": False}, "apply_chat_template is false"),
        ({"chat_template": "x", "prompt_token_ids": [1]}, "apply_chat_template is false"),
    ],
)
def test_a_template_that_no_worker_takes_is_refused_at_once(
    fields: dict[str, Any], fact: str
) -> None:
    with pytest.raises(InvalidRequest, match=fact):
        request(fields.pop("chat_template"), **fields)


def test_a_worker_takes_templates_only_if_it_was_told_to(folder: Path) -> None:
    engine = Engine.load(str(folder), device="cpu")
    with pytest.raises(InvalidRequest, match=r"chat_template: the model .* takes no template"):
        engine.chat(request(SIMPLE, max_tokens=1))
    engine.close()
    engine = Engine.load(str(folder), device="cpu", trust_request_chat_template=True)
    bare = engine.prompt_ids(request("hi"))
    assert bare == engine.tokenizer.encode("hi", add_special_tokens=False)
    assert engine.chat(request(SIMPLE, max_tokens=1)).usage
    engine.close()
