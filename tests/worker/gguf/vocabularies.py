"""Writes the vocabularies of the test tokenizers into GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.worker.gguf.texts import texts
from tests.worker.tokenizers import CORPUS, Style, make_tokenizer

SPECIAL_IDS: dict[Style, dict[str, str]] = {
    "llama2": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "llama3": {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
    "qwen": {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
    "gemma": {"bos": "<bos>", "eos": "<eos>", "unk": "<unk>", "pad": "<pad>"},
}


def write_vocabulary(writer: gguf.GGUFWriter, style: Style, pre: str = "qwen2") -> int:
    """Returns the number of tokens."""
    values = json.loads(make_tokenizer(style).to_str())
    added = {entry["id"]: entry for entry in values["added_tokens"]}
    model = values["model"]
    ids: dict[str, int] = {**model["vocab"], **{e["content"]: i for i, e in added.items()}}
    tokens = sorted(ids, key=lambda token: ids[token])
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    sentencepiece = style in ("llama2", "gemma")
    kinds = [_kind(token, added.get(index), sentencepiece) for index, token in enumerate(tokens)]
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("default" if sentencepiece else pre)
    if sentencepiece:
        writer.add_token_scores(_scores(tokens, model["merges"]))
        writer.add_add_space_prefix(style == "llama2")
        tokens = [_stored(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    else:
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, token in SPECIAL_IDS[style].items():
        getattr(writer, f"add_{name}_token_id")(tokens.index(token))
    return len(tokens)


def _kind(token: str, added: dict[str, Any] | None, sentencepiece: bool) -> gguf.TokenType:
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if added is not None:
        return gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    if sentencepiece and token.startswith("<0x"):
        return gguf.TokenType.BYTE
    if sentencepiece and len(token) > 1 and not token.strip("▁"):
        return gguf.TokenType.USER_DEFINED  # runs of spaces
    return gguf.TokenType.NORMAL


def _stored(token: str, kind: gguf.TokenType) -> str:
    """The converter stores user-defined tokens with real spaces."""
    return token.replace("▁", " ") if kind is gguf.TokenType.USER_DEFINED else token


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Earlier merges have higher scores; characters have the lowest."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges) + index)) for index, token in enumerate(tokens)]


@cache
def wide(byte_level: bool) -> tuple[list[str], list[list[str]]]:
    """Tokens and merges of a BPE that was trained without splitting: tokens go across words, digits
    and white space, so that the ids of a text depend on how it is split."""
    tokenizer = Tokenizer(models.BPE())
    alphabet: list[str] = []
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts(), *CORPUS.splitlines()], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=lambda token: model["vocab"][token]), model["merges"]


def write_wide_vocabulary_file(path: Path, pre: str | None) -> Path:
    """Byte-level with a pre-tokenizer, or SentencePiece."""
    writer = gguf.GGUFWriter(path, "llama")
    tokens, merges = wide(pre is not None)
    normal, byte = gguf.TokenType.NORMAL, gguf.TokenType.BYTE
    if pre is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in merges])
        kinds = [normal] * len(tokens)
    else:
        first = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256))]
        special = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
        kinds = [*special, *[byte] * 256, *[normal] * len(tokens)]
        tokens = [*first, *tokens]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores(_scores(tokens, merges))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_vocab_size(len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_vocabulary_file(path: Path, style: Style, pre: str = "qwen2", **extra: Any) -> Path:
    """A file with a vocabulary and no tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    count = write_vocabulary(writer, style, pre)
    writer.add_vocab_size(count)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
