"""Trains the tokenizer and writes the model folder in the Hugging Face layout.

`training.train_demo` writes the folder before training, so that it is complete from the start, and
the weights again during training.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.normalizers import NFC
from torch import Tensor

from training.chat import CHAT_TEMPLATE, END_OF_TEXT, END_THINK, IM_END, IM_START, THINK
from training.model import Qwen3Config
from training.tasks import training_examples

SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
PLAIN_TOKENS = (THINK, END_THINK)
TOKENIZER_EXAMPLES = 40_000

# Qwen's pattern: one token per digit.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Merges for the role names of the chat format, from rare pairs, so that few other words use them.
ROLE_MERGES = (
    *(("y", "s"), ("s", "ys"), ("sys", "t"), ("syst", "e"), ("syste", "m")),
    *(("u", "s"), ("us", "e"), ("use", "r")),
    *(("s", "s"), ("a", "ss"), ("ass", "i"), ("assi", "s"), ("assis", "t")),
    *(("assist", "a"), ("assista", "n"), ("assistan", "t")),
)


def _merges(counts: Counter[str], limit: int) -> list[tuple[str, str]]:
    """Merges that build the most frequent pre-tokens, each from its start, letter by letter.

    Every merge extends a prefix, and no prefix starts with a lower-case letter or a quote, except
    those of the role names. So each word of the prompts is one token, and any other word is split
    into letters after at most one longer token, which lets the model spell it.
    """
    merges: dict[tuple[str, str], int] = dict.fromkeys(ROLE_MERGES, 0)
    for piece, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if piece[0].islower() or piece[0] in "\"'":
            continue
        for end in range(1, len(piece)):
            if len(merges) < limit:
                merges.setdefault((piece[:end], piece[end]), end)
    return sorted(merges, key=lambda pair: merges[pair])


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Byte-level BPE on the training texts; Qwen's added tokens come last in the vocabulary."""
    pieces = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts: Counter[str] = Counter()
    for example in islice(training_examples(random.Random(seed)), TOKENIZER_EXAMPLES):
        texts = [message["content"] for message in example.messages]
        # The newlines around a think block must be tokens, as in Qwen's vocabulary.
        texts += [f"\n{example.reasoning}\n", f"\n\n{example.answer}"]
        for text in texts:
            counts.update(piece for piece, _ in pieces.pre_tokenize_str(text))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    added = len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
    merges = _merges(counts, vocab_size - len(letters) - added)
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = pieces
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_texts(out: Path, config: Qwen3Config, tokenizer: Tokenizer) -> None:
    """Write all files except the weights."""
    out.mkdir(parents=True, exist_ok=True)
    end, text_end = tokenizer.token_to_id(IM_END), tokenizer.token_to_id(END_OF_TEXT)
    _write_json(
        out / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(config),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": text_end,
            "eos_token_id": end,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": config.num_hidden_layers,
            "rope_scaling": None,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        },
    )
    _write_json(
        out / "generation_config.json",
        {
            "bos_token_id": text_end,
            "do_sample": False,
            "eos_token_id": [end, text_end],
            "pad_token_id": text_end,
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token in SPECIAL_TOKENS,
        }
        for token in SPECIAL_TOKENS + PLAIN_TOKENS
    }
    _write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": [IM_START, IM_END],
            "bos_token": None,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": IM_END,
            "errors": "replace",
            "model_max_length": config.max_position_embeddings,
            "pad_token": END_OF_TEXT,
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )


def write_weights(out: Path, weights: dict[str, Tensor]) -> None:
    """Write the weights in bfloat16 by their published names, without the tied output layer."""
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
