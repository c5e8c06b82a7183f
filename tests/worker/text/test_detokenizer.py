"""Incremental detokenizing, compared with `tokenizers` decoding the whole sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.sources import read_tokenizer
from tests.worker.tokenizers import STYLES, save_tokenizer
from worker.checkpoint.tokenizer import Tokenizer
from worker.text.detokenizer import Detokenizer

METASPACE = {
    "type": "Sequence",
    "decoders": [
        {"type": "ByteFallback"},
        {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": False,
        },
    ],
}
KINDS = (*STYLES, "metaspace")
# Letters, combining marks, joined emoji, right-to-left text, control characters: byte tokens split
# them within a character or a grapheme cluster.
PIECES = st.sampled_from(
    [
        "the answer is 42",
        " ",
        "\n\n",
        "naïve",
        "e\u0301\u0328",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "你好",
        "שלום",
        "\t\r\n",
        "\ufffd",
        "\x00",
        "<think>",
        "▁",
        "Ġ",
    ]
)
TEXT = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=6).map("".join)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind of decoder."""
    made = {}
    for style in STYLES:
        folder = tmp_path_factory.mktemp(style)
        save_tokenizer(folder, style)
        made[str(style)] = read_tokenizer(folder)
    folder = tmp_path_factory.mktemp("metaspace")
    save_tokenizer(folder, "llama2")
    change_decoder(folder, METASPACE)
    made["metaspace"] = read_tokenizer(folder)
    return made


@cache
def drawn_ids(tokenizer: Tokenizer) -> tuple[st.SearchStrategy[int], ...]:
    """Any token, those of one byte, and special ones."""
    every = range(tokenizer.vocab_size)
    return (
        st.sampled_from(every),
        st.sampled_from([i for i in every if len(tokenizer.token_bytes(i)) == 1]),
        st.sampled_from([i for i in every if tokenizer.is_special(i)]),
    )


def change_decoder(folder: Path, decoder: object) -> None:
    file = folder / "tokenizer.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["decoder"] = decoder
    file.write_text(json.dumps(values), encoding="utf-8")


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special: bool = True) -> list[str]:
    """The text of each token, and last the text of finish()."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT)
@settings(max_examples=60)
def test_streamed_text_equals_the_decoded_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=100)
def test_streamed_text_of_random_tokens_equals_the_decoded_text(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    every, byte, _ = drawn_ids(tokenizer)
    ids = data.draw(st.lists(st.one_of(every, byte), max_size=30))
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=80)
def test_special_tokens_are_text_where_they_are_not_skipped(
    tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizers[kind]
    every, _, special = drawn_ids(tokenizer)
    ids = data.draw(st.lists(st.one_of(every, special), max_size=20))
    shown = "".join(streamed(tokenizer, ids, skip_special=False))
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_returns_a_partial_character(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("a🎉b👩‍👩‍👧c")
    pieces = streamed(tokenizer, ids)
    assert len(ids) > 12  # the emoji are byte tokens
    assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_character_is_returned_at_the_end(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("x🎉")[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]) == "x"
    assert pieces[-1] == tokenizer.decode(ids).removeprefix("x")
    assert set(pieces[-1]) == {"\ufffd"}


@pytest.mark.parametrize(
    ("kind", "first"),
    [
        ("llama2", "the"),
        ("metaspace", "the"),
        ("llama3", " the"),
        ("qwen", " the"),
        ("gemma", " the"),
    ],
)
def test_only_a_leading_space_is_dropped_and_only_if_the_decoder_strips_it(
    tokenizers: dict[str, Tokenizer], kind: str, first: str
) -> None:
    tokenizer = tokenizers[kind]
    word = tokenizer.encode("of the")[-1]
    assert "".join(streamed(tokenizer, [word, word, word])) == f"{first} the the"


def test_special_tokens_are_empty_and_keep_the_start_of_the_text(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["llama2"]
    begin, end = tokenizer.id_of("<s>"), tokenizer.id_of("</s>")
    word = tokenizer.encode("of the")[-1]
    assert begin is not None and end is not None
    assert streamed(tokenizer, [begin, word, end, word, end]) == ["", "the", "", " the", "", ""]


def test_visible_added_tokens_are_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen"]
    ids = tokenizer.encode("<think>\nso\n</think>\n\n42<|im_end|>")
    assert "".join(streamed(tokenizer, ids)) == "<think>\nso\n</think>\n\n42"


@given(answer=st.sampled_from(["the answer", "42", "你好", "🎉 the", "a"]))
def test_a_completion_sent_back_gives_the_same_prompt_tokens(
    tokenizers: dict[str, Tokenizer], answer: str
) -> None:
    """Llama 2's template writes the space between `[/INST]` and the answer."""
    tokenizer = tokenizers["llama2"]
    prompt = tokenizer.encode("<s>[INST] hi [/INST]")
    whole = tokenizer.encode(f"<s>[INST] hi [/INST] {answer}")
    assert whole[: len(prompt)] == prompt
    assert "".join(streamed(tokenizer, whole[len(prompt) :])) == answer
