"""The incremental splitter of harmony messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.api.request import ChatRequest
from tests.worker.checkpoints import make_checkpoint
from tests.worker.sources import read_tokenizer
from tests.worker.templates import HARMONY
from tests.worker.tokenizers import save_tokenizer
from worker import Engine
from worker.text.harmony import MARKERS, MAX_HEADER_CHARACTERS, HarmonySplitter, writes_harmony

PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>so<|end|>"
AGAIN = "<|start|>assistant"
CALL = "<|channel|>commentary to=functions.find <|constrain|>json<|message|>{}"
CALL_OF_LIST = CALL.replace("{}", "[]")
LONG = "<|channel|>finally " + "x" * MAX_HEADER_CHARACTERS  # no header
PART = st.sampled_from(
    [
        *(*MARKERS, "<|", "|>", "<|chan", "nel|>", "<|en", "d|>", "analysis", "final", "assistant"),
        "<|channel|>final",
        *(" to=functions.f", "t", "o=", "so", "42", " ", "\n", "x" * MAX_HEADER_CHARACTERS),
    ]
)


def split(pieces: list[str], prompt: str = PROMPT) -> tuple[str, str]:
    """(content, reasoning) of a completion in pieces."""
    splitter = HarmonySplitter(prompt)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.flush()]
    return "".join(content for content, _ in parts), "".join(thought for _, thought in parts)


@pytest.mark.parametrize(
    ("text", "content", "reasoning"),
    [
        (f"{THOUGHT}{AGAIN}<|channel|>final<|message|>42", "42", "so"),
        ("<|channel|>final<|message|>42\n", "42\n", ""),
        ("<|channel|>analysis<|message|>so it g", "", "so it g"),
        (f"{THOUGHT}{AGAIN}{THOUGHT}{AGAIN}<|channel|>fin", "", "so\nso"),
        (f"{THOUGHT}{AGAIN}<|channel|>commentary<|message|>Wait.<|end|>{AGAIN}{CALL}", None, "so"),
        (
            f"{THOUGHT}{AGAIN} to=functions.find<|channel|>commentary json<|message|>{{}}",
            None,
            "so",
        ),
        ("<|channel|>analysis<|message|>so<|channel|>final<|message|>42", "42", "so"),
        (f"<|channel|>analysis<|message|>so{AGAIN}<|channel|>final<|message|>42", "42", "so"),
        (
            "<|channel|>commentary<|message|>Wait.<|channel|>analysis<|message|>so"
            "<|channel|>final<|message|>42",
            "Wait.\n42",
            "so",
        ),
        (f"<|channel|>analysis<|message|>so{CALL_OF_LIST}", CALL_OF_LIST, "so"),
        ("<|channel|>final<|message|>a <|channel|> b", "a <|channel|> b", ""),
        (f"<|channel|>final<|message|>a{LONG}", f"a\n{LONG}", ""),
        ("<|message|>42", "42", ""),
        ("42 is the answer", "42 is the answer", ""),
        ("to be", "to be", ""),
        ("to", "to", ""),
        ("", "", ""),
        ("<|channel|>" + "x" * 300, "<|channel|>" + "x" * 300, ""),
        ("<|channel|>final<|message|>a<|end|>\n", "a", ""),
        ("<|channel|>final<|message|>a < b <|e", "a < b <|e", ""),
    ],
)
def test_the_channel_analysis_is_reasoning_and_the_rest_content(
    text: str, content: str | None, reasoning: str
) -> None:
    if content is None and " to=functions.find<" in text:
        content = " to=functions.find<|channel|>commentary json<|message|>{}"
    elif content is None:
        content = f"Wait.\n{CALL}"
    assert split(list(text)) == (content, reasoning)
    assert split([text]) == (content, reasoning)


@given(pieces=st.lists(st.lists(PART, max_size=3).map("".join), max_size=10))
def test_the_result_does_not_depend_on_how_the_text_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert split(pieces) == split([text]) == split(list(text))


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (f"{PROMPT}<|channel|>final<|message|>4", ("2", "")),
        (f"{PROMPT}<|channel|>analysis<|message|>4", ("", "2")),
        ("no markers", ("2", "")),
    ],
)
def test_a_completion_may_continue_a_message(prompt: str, parts: tuple[str, str]) -> None:
    assert split(["2"], prompt) == parts


def test_text_is_returned_as_soon_as_possible() -> None:
    splitter = HarmonySplitter(PROMPT)
    shown = []
    for piece in ("<|channel|>", "analysis", "<|message|>", "so", " <", "<|end|>", AGAIN):
        shown.append((*splitter.push(piece), splitter.inside))
    assert shown == [
        ("", "", False),
        ("", "", False),
        ("", "", True),
        ("", "so", True),
        ("", " ", True),
        ("", "<", False),
        ("", "", False),
    ]


def test_a_model_writes_harmony_if_it_has_the_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "other", "qwen")
    assert not writes_harmony(read_tokenizer(tmp_path / "other"))
    save_tokenizer(tmp_path / "harmony", "harmony")
    assert writes_harmony(read_tokenizer(tmp_path / "harmony"))


def test_an_engine_separates_the_channels_of_gpt_oss(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "gpt_oss", vocab_size=420)
    save_tokenizer(path, "harmony", HARMONY)
    engine = Engine.load(str(path), device="cpu")

    def answer(token: str, **fields: object) -> tuple[str | None, str | None]:
        bias = {str(engine.tokenizer.id_of(token)): 100}
        history = [{"role": "user", "content": "hi"}]
        if fields:
            history.append({"role": "assistant", "content": "4"})
        request = ChatRequest.parse(
            {
                **{"model": "m", "messages": history, "logit_bias": bias, **fields},
                **{"temperature": 0, "max_tokens": 3, "ignore_eos": True},
            }
        )
        message = engine.chat(request).choices[0].message
        return message.content, message.reasoning_content

    # The first marker begins a message without a channel; the others are text in it.
    assert answer("<|message|>") == ("<|message|>" * 2, None)
    assert answer("<|return|>") == ("", None)
    assert answer("a", continue_final_message=True) == ("aaa", None)
