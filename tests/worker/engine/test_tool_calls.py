"""Tool calls from the engine: requests with tools, streams and completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion as OpenAICompletion
from openai.types.chat import ChatCompletionChunk as OpenAIChunk
from torch import Tensor

from jobs import ChatRequest, JobError
from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from tests.worker.checkpoints import make_checkpoint
from tests.worker.scripted import scripted
from tests.worker.templates import CHATML, LLAMA3, QWEN_TEMPLATE
from tests.worker.tokenizers import save_tokenizer
from worker import Engine
from worker.device import Device
from worker.engine.engine import EngineCore
from worker.model_spec import ModelSpec
from worker.prompt.template import template_path
from worker.sampling.inputs import SamplingBatch
from worker.sampling.sampler import Drawn

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TIMES = '<tool_call>\n{"name": "times", "arguments": {"b": "two"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return Engine.load(str(folder), device="cpu", max_batch=4)


def ask(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "1 + 1?"}]
    return ChatRequest(model="m", messages=messages, **{"tools": TOOLS, **fields})


class Answering:
    """A model that answers with given texts, one per choice. `options`: of its `ModelSpec`."""

    def __init__(self, folder: Path, **options: Any) -> None:
        spec = ModelSpec(reference=str(folder), max_batch=4, **options)
        self.engine = Engine(
            EngineCore.load(spec, device=Device(torch.device("cpu")), draw=self._draw)
        )
        self._answers: list[list[int]] = []

    def script(self, *texts: str) -> None:
        self._answers = [self.engine.tokenizer.encode(text) for text in texts]

    def _draw(self, logits: Tensor, batch: SamplingBatch) -> Drawn:
        return scripted(self._answers)(logits, batch)

    def chat(self, *texts: str, **fields: Any) -> ChatCompletion:
        self.script(*texts)
        return self.engine.chat(ask(**fields))

    def stream(self, *texts: str, **fields: Any) -> list[ChatChunk]:
        self.script(*texts)
        return list(self.engine.stream(ask(**fields)))


@pytest.fixture(scope="module")
def answering(folder: Path) -> Answering:
    return Answering(folder)


def calls_of(completion: ChatCompletion, choice: int = 0) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in completion.choices[choice].message.tool_calls or ()
    ]


def accumulated(chunks: list[ChatChunk]) -> Any:
    """The completion that openai's client makes of these chunks."""
    state: Any = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(OpenAIChunk.model_validate(chunk.to_dict()))
    return state.get_final_completion()


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "reason"),
    [
        (ADD, None, None, [("add", {"a": 1})], "tool_calls"),
        (f"{ADD}\n{TIMES}", None, None, [("add", {"a": 1}), ("times", {"b": "two"})], "tool_calls"),
        (f"I add.\n{ADD}", "I add.", None, [("add", {"a": 1})], "tool_calls"),
        (
            f"<think>\nso {ADD}\n</think>\n\n{ADD}",
            None,
            f"so {ADD}",
            [("add", {"a": 1})],
            "tool_calls",
        ),
        (BROKEN, BROKEN, None, [], "stop"),
        ("The answer is 2.", "The answer is 2.", None, [], "stop"),
    ],
    ids=["one", "parallel", "after text", "after reasoning", "malformed", "no call"],
)
def test_stream_and_completion_have_the_same_calls(
    answering: Answering,
    text: str,
    content: str | None,
    reasoning: str | None,
    calls: list[Any],
    reason: str,
) -> None:
    completion = answering.chat(text)
    choice = completion.choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == (content, reasoning)
    assert calls_of(completion) == calls
    assert choice.finish_reason == reason
    OpenAICompletion.model_validate(completion.to_dict())

    streamed = accumulated(answering.stream(text)).choices[0]
    assert streamed.finish_reason == reason
    assert (streamed.message.content or None) == content
    found = [
        (c.function.name, json.loads(c.function.arguments))
        for c in streamed.message.tool_calls or ()
    ]
    assert found == calls


def test_calls_have_ids_of_their_own_and_an_index(answering: Answering) -> None:
    chunks = answering.stream(f"{ADD}\n{TIMES}")
    calls = [c for chunk in chunks for one in chunk.choices for c in one.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert len({call.id for call in calls}) == 2
    assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_text_of_a_call_is_never_streamed(answering: Answering) -> None:
    chunks = answering.stream(f"I add.\n{ADD}")
    assert "".join(chunk.text for chunk in chunks) == "I add."


@pytest.mark.parametrize("cut", [1, 5, 12, 20])
def test_a_call_that_the_length_cuts_stays_text(answering: Answering, cut: int) -> None:
    completion = answering.chat(ADD, max_tokens=cut)
    plain = answering.chat(ADD, max_tokens=cut, tools=None)
    assert completion.text == plain.text != ""
    assert completion.choices[0].message.tool_calls is None
    assert completion.choices[0].finish_reason == "length"
    chunks = answering.stream(ADD, max_tokens=cut)
    assert "".join(chunk.text for chunk in chunks) == plain.text


def test_whole_calls_before_a_cut_are_kept(answering: Answering) -> None:
    whole = len(answering.engine.tokenizer.encode(ADD))
    completion = answering.chat(ADD + TIMES, max_tokens=whole + 5)
    assert calls_of(completion) == [("add", {"a": 1})]
    assert completion.text.startswith("<tool_call>")
    assert completion.choices[0].finish_reason == "length"


def test_a_stop_string_ends_an_answer_with_calls(answering: Answering) -> None:
    completion = answering.chat(f"{ADD}\nObservation: 2", stop=["Observation"])
    assert calls_of(completion) == [("add", {"a": 1})]
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == (
        None,
        "tool_calls",
    )
    assert calls_of(answering.chat(ADD, stop=["</tool_call>"])) == [("add", {"a": 1})]


def test_each_choice_has_its_own_calls(answering: Answering) -> None:
    texts = (ADD, "Two.", f"{TIMES}\n{ADD}")
    completion = answering.chat(*texts, n=3)
    assert [calls_of(completion, i) for i in range(3)] == [
        [("add", {"a": 1})],
        [],
        [("times", {"b": "two"}), ("add", {"a": 1})],
    ]
    reasons = [choice.finish_reason for choice in completion.choices]
    assert reasons == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}], ids=str)
def test_without_tools_the_answer_is_text(answering: Answering, fields: dict[str, Any]) -> None:
    completion = answering.chat(ADD, **fields)
    assert (completion.text, completion.choices[0].message.tool_calls) == (ADD, None)
    assert completion.choices[0].finish_reason == "stop"


def test_tool_choice_none_keeps_the_definitions_from_the_template(engine: Engine) -> None:
    assert engine.prompt_ids(ask(tool_choice="none")) == engine.prompt_ids(ask(tools=None))
    assert engine.prompt_ids(ask()) != engine.prompt_ids(ask(tools=None))


def test_an_answer_with_calls_continues_as_history(answering: Answering) -> None:
    message = answering.chat(ADD).choices[0].message
    messages: list[Any] = [{"role": "user", "content": "1 + 1?"}, message.model_dump()]
    assert message.tool_calls is not None
    messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"})
    request = ChatRequest(model="m", messages=messages, tools=TOOLS)
    prompt = answering.engine.tokenizer.decode(answering.engine.prompt_ids(request))
    assert ADD in prompt


def plain_folder(folder: Path, path: Path, template: str) -> Path:
    """A copy of the model with another chat template."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).hardlink_to(file)
    (path / "tokenizer_config.json").unlink()
    (path / "tokenizer.json").unlink()
    save_tokenizer(path, "qwen", template)
    return path


def test_a_template_that_ignores_tools_refuses_them(folder: Path, tmp_path: Path) -> None:
    path = plain_folder(folder, tmp_path / "plain", CHATML)
    engine = Engine.load(str(path), device="cpu")
    with pytest.raises(JobError) as caught:
        engine.chat(ask())
    assert (caught.value.code, caught.value.param) == ("invalid_request", "tools")
    assert caught.value.message == (
        "tools are not supported: the chat template of model plain ignores them, so the model "
        "would not see them; remove them, or start the worker with --chat-template FILE or "
        "--tool-parser NAME"
    )
    assert engine.prompt_ids(ask(tool_choice="none")) == engine.prompt_ids(ask(tools=None))

    with_parser = Answering(path, tool_parser="hermes")
    assert with_parser.engine.prompt_ids(ask()) == engine.prompt_ids(ask(tools=None))
    assert calls_of(with_parser.chat(ADD)) == [("add", {"a": 1})]

    file = tmp_path / "tools.jinja"
    file.write_text(QWEN_TEMPLATE)
    with_template = Answering(path, chat_template=template_path(file))
    assert with_template.engine.prompt_ids(ask()) != engine.prompt_ids(ask(tools=None))
    assert calls_of(with_template.chat(ADD)) == [("add", {"a": 1})]
    assert with_template.engine.info.template_hash != engine.info.template_hash


def test_a_chosen_parser_goes_before_the_template(folder: Path) -> None:
    answering = Answering(folder, tool_parser="llama3_json")
    call = '{"name": "add", "parameters": {"a": 1}}'
    assert calls_of(answering.chat(call)) == [("add", {"a": 1})]
    assert calls_of(answering.chat(ADD)) == []


def test_special_tokens_of_a_syntax_are_seen(folder: Path, tmp_path: Path) -> None:
    """Llama 3's python tag is a special token, which is left out of texts."""
    path = plain_folder(folder, tmp_path / "llama", LLAMA3)
    text = (path / "tokenizer.json").read_text().replace("<|im_start|>", "<|python_tag|>")
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_text(text)
    answering = Answering(path)
    call = 'I add.<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    completion = answering.chat(call)
    assert (completion.text, calls_of(completion)) == ("I add.", [("add", {"a": 1})])
    assert "python_tag" not in answering.chat(call, tools=None).text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_parser": "mistral"}, "tool_parser must be one of hermes, .* got 'mistral'"),
        ({"chat_template": "/not/there.jinja"}, "/not/there.jinja can't be read: No such file"),
        ({"chat_template": "{folder}/model.safetensors"}, "is not UTF-8 text"),
        (
            {"chat_template": "{folder}/bad.jinja"},
            r"^invalid_request: chat template /.*/bad\.jinja is not valid Jinja \([^;]*\)$",
        ),
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    (folder / "bad.jinja").write_text("{% if")
    given: Any = {name: value.format(folder=folder) for name, value in options.items()}
    with pytest.raises(JobError, match=message) as caught:
        Engine.load(str(folder), device="cpu", **given)
    assert (caught.value.code, caught.value.param) == ("invalid_request", next(iter(options)))
