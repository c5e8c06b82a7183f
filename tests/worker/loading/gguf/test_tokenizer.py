"""Tokenizers from a file's metadata give the ids of llama.cpp's tokenizer (recorded; see
record.py), and decode like the tokenizer.json that the vocabulary came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import JobError
from tests.worker.loading.gguf.cases import make_vocabulary, vocabularies
from tests.worker.loading.gguf.record import ANSWERS, digest
from tests.worker.loading.gguf.texts import FIXED, texts
from tests.worker.loading.gguf.vocabularies import write_vocabulary_file
from tests.worker.tokenizers import STYLES, Style, make_tokenizer
from worker.loading.gguf.source import GgufSource
from worker.loading.tokenizer import Tokenizer
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
