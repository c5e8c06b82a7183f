"""The vocabulary of a model as llguidance takes it: the bytes of every token, by our own table.

So every tokenizer that streams text can be constrained: byte-level and byte-fallback ones, those of
GGUF files, and ids that only the model has.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from llguidance import LLTokenizer, TokenizerWrapper

from worker.checkpoint.tokenizer import Tokenizer


class _Vocabulary(TokenizerWrapper):
    """What llguidance asks of a tokenizer. `size`: width of the model's logits. Special tokens, and
    ids without text, are no part of a text."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos: int) -> None:
        self.is_tokenizer_wrapper = True
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = [one for one in range(size) if tokenizer.is_special(one)]
        self._encode = partial(tokenizer.encode, add_special_tokens=False)

    def __call__(self, s: str) -> list[int]:
        return self._encode(s)


def grammar_vocabulary(tokenizer: Tokenizer, size: int, ends: Collection[int]) -> LLTokenizer:
    """Takes a second or two for a large vocabulary. `ends`: all tokens that end a completion."""
    eos = sorted(one for one in ends if one < size)
    # Without an end token, an answer ends where its grammar does.
    wrapped = _Vocabulary(tokenizer, size, eos[0] if eos else size - 1)
    slices = LLTokenizer.json_slices()
    return LLTokenizer(wrapped, n_vocab=size, eos_token=eos or None, slices=slices)
