"""The vocabulary in a file's metadata: tokens, their kinds, and the special ones by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jobs.sizes import counted
from worker.gguf.read.metadata import Metadata
from worker.gguf.tokenizer_keys import (
    ENDS,
    MODEL,
    NAMED,
    SENTENCEPIECE,
    SPECIAL,
    TOKENS,
    TYPES,
    Kind,
)

SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}  # where a file doesn't state them
# Tokens for code with holes that also end a completion.
FILL_IN_ENDS = frozenset(
    (
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
        *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens and kinds by id; `special` are ids by the keys of SPECIAL."""

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
        for name, key in SPECIAL.items():
            if key in metadata.values:
                special[name] = metadata.integer(key, minimum=0)
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
        return {
            f"{name}_token": self.tokens[self.special[name]]
            for name in NAMED
            if name in self.special
        }
