"""The vocabulary in a file's metadata: tokens, their kinds, and the special ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

from jobs.sizes import counted
from worker.gguf.read.metadata import Metadata

TOKENS, TYPES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES, MERGES = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
ADD_BOS, ADD_EOS = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
ADD_SPACE = "tokenizer.ggml.add_space_prefix"
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # values of tokenizer.ggml.model
# The special tokens by the names of their keys.
KEYS = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unk": "unknown",
    "sep": "seperator",  # as it is spelled in the files
    "pad": "padding",
    "mask": "mask",
    "fim_pad": "fim_pad",
    "fim_rep": "fim_rep",
    "fim_sep": "fim_sep",
}
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where a file doesn't state them
# Tokens that end a completion, whatever the file says of them: files have no list of such tokens.
ENDS = frozenset(
    (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<\uff5cend▁of▁sentence\uff5c>", "[e~["),
    )
)
# Tokens for code with holes that also end a completion.
FILL_IN_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
        *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)


class Kind(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and kinds by id; `special` are ids by the keys of KEYS."""

    tokens: list[str]
    kinds: list[int]
    special: Mapping[str, int]

    @classmethod
    def read(cls, metadata: Metadata) -> Vocabulary:
        """Raises JobError("unsupported_model")."""
        given = metadata.texts(TOKENS)
        if not given:
            raise metadata.error(f"{TOKENS} is empty")
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(given)]
        if len(set(tokens)) < len(tokens):
            ids: dict[str, int] = {}
            for index, token in enumerate(tokens):
                first = ids.setdefault(token, index)
                if first != index:
                    raise metadata.error(f"{TOKENS} has {token!r} as {first} and as {index}")
        kinds = [int(kind) for kind in metadata.numbers(TYPES, [Kind.NORMAL] * len(tokens))]
        if len(kinds) < len(tokens):
            has = counted(len(kinds), "value")
            raise metadata.error(f"{TYPES} has {has} for {counted(len(tokens), 'token')}")
        sentencepiece = metadata.text(MODEL, "") == SENTENCEPIECE
        special = dict(SENTENCEPIECE_IDS) if sentencepiece else {}
        for name, key in KEYS.items():
            full = f"tokenizer.ggml.{key}_token_id"
            if full in metadata.values:
                special[name] = metadata.integer(full, minimum=0)
        within = {name: index for name, index in special.items() if index < len(tokens)}
        return cls(tokens, kinds[: len(tokens)], within)

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a completion, by llama.cpp's rules."""
        found = {self.ids[token] for token in ENDS if token in self.ids}
        found |= {self.ids[token] for token in FILL_IN_ENDS if self._is_marked(token)}
        names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        found |= {self.special[name] for name in names if name in self.special}
        # Formats with channels end a message, and not the completion, with <|end|>.
        texts = {self.tokens[index] for index in found}
        if {"<|return|>", "<|call|>"} <= texts or {"<|call|>", "<|flush|>"} <= texts:
            found.discard(self.ids.get("<|end|>", -1))
        if "<|tool_response>" in texts:
            found.discard(self.ids.get("</s>", -1))
        return frozenset(found)

    def ends_by_text(self, index: int) -> bool:
        """True if a token ends a completion because of its text, which makes it a control token
        even if the file says otherwise."""
        return index in self.ends and self.tokens[index] in ENDS

    def _is_marked(self, token: str) -> bool:
        index = self.ids.get(token)
        return index is not None and self.kinds[index] in (Kind.CONTROL, Kind.USER_DEFINED)

    @property
    def names(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use: bos_token, eos_token, …"""
        named = ("bos", "eos", "unk", "sep", "pad", "mask")
        return {f"{n}_token": self.tokens[self.special[n]] for n in named if n in self.special}
