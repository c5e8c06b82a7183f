"""Tokenizers from a file's metadata give the ids of llama.cpp's tokenizer (recorded; see
record.py), and decode like the tokenizer.json that the vocabulary came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HubTokenizer

from jobs import JobError
from tests.worker.gguf.cases import make_vocabulary, vocabularies
from tests.worker.gguf.record import ANSWERS, digest
from tests.worker.gguf.texts import FIXED, texts
from tests.worker.gguf.vocabularies import write_vocabulary_file
from tests.worker.tokenizers import STYLES, Style, make_tokenizer
from worker.checkpoint.tokenizer import Tokenizer
from worker.gguf.read.source import GgufSource
from worker.text.detokenizer import Detokenizer

RECORDED = json.loads(ANSWERS.read_text(encoding="utf-8"))["vocabularies"]


def tokenizer_of(path: Path) -> Tokenizer:
    return GgufSource([path], str(path), "m").tokenizer


@pytest.mark.parametrize("name", vocabularies())
def test_ids_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_vocabulary(tmp_path / "v.gguf", name))
    expected = RECORDED[name].split()
    given = texts()
    assert len(expected) == len(given)
    wrong = [
        (text, ids)
        for text, answer in zip(given, expected, strict=True)
        if digest(ids := tokenizer.encode(text)) != answer
    ]
    assert wrong == []


@pytest.mark.parametrize("style", STYLES)
def test_texts_decode_to_themselves(style: Style, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_vocabulary_file(tmp_path / "v.gguf", style, "llama-bpe"))
    for text in FIXED:
        ids = tokenizer.encode(text)
        detokenizer = Detokenizer(tokenizer, skip_special=False)
        streamed = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert streamed == tokenizer.decode(ids, skip_special_tokens=False)
        if "<" not in text and "▁" not in text:
            assert streamed == text


@pytest.mark.parametrize("style", STYLES)
def test_special_tokens_are_those_of_the_original(style: Style, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_vocabulary_file(tmp_path / "v.gguf", style, "llama-bpe"))
    original = json.loads(make_tokenizer(style).to_str())["added_tokens"]
    for entry in original:
        assert tokenizer.encode(entry["content"]) == [entry["id"]]
        assert tokenizer.is_special(entry["id"]) == entry["special"]


@pytest.mark.parametrize(
    ("style", "flags", "begins"),
    [
        ("llama2", {}, True),
        ("llama2", {"add_bos_token": False}, False),
        ("llama3", {}, True),
        ("gemma", {}, True),
        ("qwen", {"bos_token_id": 5}, False),
        ("qwen", {"bos_token_id": 5, "add_bos_token": True}, True),
    ],
)
def test_texts_begin_with_bos_by_the_file_or_its_kind(
    style: Style, flags: dict[str, bool], begins: bool, tmp_path: Path
) -> None:
    pre = "llama-bpe" if style == "llama3" else "qwen2"
    path = write_vocabulary_file(tmp_path / "v.gguf", style, pre, **flags)
    tokenizer = tokenizer_of(path)
    plain, whole = tokenizer.encode("the dog"), tokenizer.encode("the dog", add_special_tokens=True)
    assert (whole[1:] == plain) == begins
    assert (whole == plain) != begins


def test_an_unknown_kind_of_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_vocabulary_file(tmp_path / "v.gguf", "qwen", "kimi-k9")
    with pytest.raises(JobError) as caught:
        tokenizer_of(path)
    assert caught.value.code == "unsupported_model"
    assert "unsupported tokenizer.ggml.pre 'kimi-k9'; supported: " in caught.value.message


def test_a_tokenizer_json_beside_the_file_takes_precedence(tmp_path: Path) -> None:
    path = write_vocabulary_file(tmp_path / "v.gguf", "qwen", "kimi-k9")
    make_tokenizer("llama3").save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_of(path).id_of("<|eom_id|>") is not None


def test_phi3_tokens_take_the_white_space_after_them(tmp_path: Path) -> None:
    path = write_vocabulary_file(tmp_path / "v.gguf", "gemma", name="Phi-3-mini")
    tokenizer = tokenizer_of(path)
    turn = tokenizer.id_of("<start_of_turn>")
    assert tokenizer.encode("<start_of_turn> \nthe") == [turn, *tokenizer.encode("the")]


@pytest.mark.parametrize("style", STYLES)
def test_it_is_the_one_that_the_library_reads_from_its_json(style: Style, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_vocabulary_file(tmp_path / "v.gguf", style, "llama-bpe"))
    parsed = HubTokenizer.from_str(tokenizer.to_json())
    assert json.loads(tokenizer._inner.to_str()) == json.loads(parsed.to_str())
    assert tokenizer.vocab_size == parsed.get_vocab_size(with_added_tokens=True)


def test_the_hash_depends_on_tokens_ids_and_merges(tmp_path: Path) -> None:
    values = json.loads(
        tokenizer_of(write_vocabulary_file(tmp_path / "v.gguf", "qwen", "llama-bpe")).to_json()
    )
    model = values["model"]
    first, second, *_ = model["vocab"]
    ids = {**model["vocab"], first: model["vocab"][second], second: model["vocab"][first]}
    changed: list[dict[str, Any]] = [
        values,
        {**values, "model": {**model, "vocab": ids}},
        {**values, "model": {**model, "merges": model["merges"][:-1]}},
        {**values, "model": {**model, "ignore_merges": not model["ignore_merges"]}},
        {**values, "added_tokens": values["added_tokens"][:-1]},
    ]
    assert len({Tokenizer(one, tmp_path).hash for one in changed}) == len(changed)
    assert Tokenizer(values, tmp_path).hash == Tokenizer(values, tmp_path).hash
