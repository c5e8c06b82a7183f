"""One tokenizer.json for each kind that the families use, with about 400 tokens each."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Style = Literal["llama2", "llama3", "qwen", "gemma", "harmony"]
STYLES: tuple[Style, ...] = ("llama2", "llama3", "qwen", "gemma")

CORPUS = (
    """\
The quick brown fox jumps over the lazy dog, and then the dog sleeps in the warm morning sun.
What is two plus three? It is five; seven times eight is fifty-six, and 12 + 30 = 42.
A model reads the words of the user and writes the answer one token after the other.
def answer(question: str) -> str: return "the answer to " + question + " is 42"
Don't we'll they've I'm she'd it's; naïve café über señor. Привет мир. 你好世界。 こんにちは。
"""
    * 3
)

LETTERS_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# o200k_harmony, of gpt-oss.
_LETTER, _CASE = r"[^\r\n\p{L}\p{N}]?", (r"\p{Lu}\p{Lt}", r"\p{Ll}")
_UPPER, _LOWER = (rf"[{case}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in _CASE)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
LETTERS_O200K = (
    rf"{_LETTER}{_UPPER}*{_LOWER}+{_SUFFIX}|{_LETTER}{_UPPER}+{_LOWER}*{_SUFFIX}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LETTERS_1 = LETTERS_3.replace(r"\p{N}{1,3}", r"\p{N}")

SPECIAL: dict[Style, tuple[str, ...]] = {
    "llama2": ("<unk>", "<s>", "</s>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "gemma": ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "harmony": (
        *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
        *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
    ),
}
VISIBLE: dict[Style, tuple[str, ...]] = {
    "llama2": (),
    "llama3": (),
    "qwen": ("<tool_call>", "</tool_call>", "<think>", "</think>"),
    "gemma": (),
    "harmony": (),
}
NAMED: dict[Style, dict[str, str]] = {
    "llama2": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "gemma": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
    },
    "harmony": {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
}


def make_tokenizer(style: Style) -> Tokenizer:
    """A tokenizer with about 400 tokens: byte-level BPE (llama3, qwen), or SentencePiece BPE with
    byte fallback (llama2, gemma)."""
    return Tokenizer.from_str(_tokenizer_json(style))


@cache
def _tokenizer_json(style: Style) -> str:
    build = _byte_level if style in ("llama3", "qwen", "harmony") else _sentencepiece
    tokenizer: Tokenizer = build(style)
    text: str = tokenizer.to_str()
    return text


def _byte_level(style: Style) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    patterns = {"llama3": LETTERS_3, "qwen": LETTERS_1, "harmony": LETTERS_O200K}
    split = Regex(patterns[style])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    vocab, merges = _train(tokenizer, 400, pre_tokenizers.ByteLevel.alphabet())
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=style != "qwen")
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, style)
    if style == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    elif style == "llama3":
        tokenizer.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), begin_with(tokenizer, "<|begin_of_text|>")]
        )
    return tokenizer


def _sentencepiece(style: Style) -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "removed"),
            pre_tokenizers.Split("▁", "merged_with_next"),
        ]
    )
    pieces, merges = _train(trained, 160, [])
    spaces = ["▁" * count for count in range(2, 5)] if style == "gemma" else []
    merges += [("▁" * count, "▁") for count in range(1, 4)] if spaces else []
    tokens = [*SPECIAL[style], *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *spaces]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    _add_tokens(tokenizer, style)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama2":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
        tokenizer.post_processor = begin_with(tokenizer, "<s>")
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(steps)
        tokenizer.post_processor = begin_with(tokenizer, "<bos>")
    return tokenizer


def _train(
    tokenizer: Tokenizer, size: int, alphabet: Iterable[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE trained on CORPUS."""
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def _add_tokens(tokenizer: Tokenizer, style: Style) -> None:
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL[style]]
    )
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in VISIBLE[style]]
    )


def begin_with(tokenizer: Tokenizer, token: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )


def save_tokenizer(
    folder: Path, style: Style, chat_template: str | list[dict[str, str]] | None = None
) -> None:
    """Write tokenizer.json and tokenizer_config.json of a style."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(style).save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED[style]}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
