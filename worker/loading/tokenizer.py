"""The checkpoint's tokenizer: text → ids by `tokenizers`, ids → bytes by a table of our own.

The table makes streaming exact: what a token adds is its bytes, whatever came before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from jobs.types import JobError
from worker.loading.config import read_json

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
SPACE_MARK = "▁"
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """Encodes and decodes; knows special tokens and the bytes of every id."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        if not path.is_file():
            raise JobError(
                "model_not_found",
                f"{folder} has no {FILE}: download the model again, or convert its tokenizer with "
                "the tokenizers library",
            )
        self._path = path
        self.config: dict[str, Any] = (
            read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        )
        values, text = read_json(path), path.read_text(encoding="utf-8")
        self.hash = hashlib.sha256(text.encode()).hexdigest()[:32]
        self._read(values, text)

    def _read(self, values: dict[str, Any], text: str) -> None:
        try:
            self._inner = HubTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise JobError(
                "unsupported_model",
                f"{self._path} is not a tokenizer: {error}; download the model again",
            ) from None
        # Settings of some training run that were saved with it.
        self._inner.no_truncation()
        self._inner.no_padding()
        self._json = values
        self._added = {entry["id"]: entry for entry in values.get("added_tokens") or []}
        self._vocab: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        # One more than the highest id: ids may have holes.
        self.vocab_size = max(self._vocab.values(), default=-1) + 1
        self._table = self._make_table()

    def limited_to(self, vocab_size: int) -> Tokenizer:
        """The same tokenizer for a model of so many ids. Special tokens beyond them go: a text
        model's files may name an image's. Raises JobError if other tokens are beyond."""
        if self.vocab_size <= vocab_size:
            return self
        values = dict(self._json)
        values["added_tokens"] = [
            entry
            for entry in values.get("added_tokens") or []
            if entry["id"] < vocab_size or not entry.get("special")
        ]
        limited = copy(self)
        limited._read(values, json.dumps(values))
        if limited.vocab_size > vocab_size:
            raise JobError(
                "unsupported_model",
                f"{self._path} has {self.vocab_size} tokens and the model's vocabulary only "
                f"{vocab_size}: they don't belong together; download the model again",
            )
        return limited

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it count as such."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token by its content."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a control token that no text shows."""
        entry = self._added.get(token_id)
        return bool(entry and entry.get("special"))

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as UTF-8 bytes; a part of a character is possible.
        Nothing for ids that the model has and the tokenizer doesn't."""
        return self._table[token_id] if token_id < self.vocab_size else b""

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self._table), default=0)

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether the decoder drops one space at the very start of a text (Llama 2).

        Such tokenizers put a space before every text that they read, and no other sign says that
        a word begins: what a model writes after `[/INST]` starts with it.
        """
        if not self._json.get("decoder"):
            return True  # words joined by spaces
        return any(
            step.get("type") == "Strip" and step.get("content") == " " and step.get("start") == 1
            for step in _steps(self._json.get("decoder"))
        ) or any(
            step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
            for step in _steps(self._json.get("decoder"))
        )

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token and the like by name, as chat templates use them."""
        tokens = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"):
            value = self.config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
        return tokens

    def _make_table(self) -> list[bytes]:
        """The bytes of every id, by the way this tokenizer's decoder spells them."""
        steps = list(_steps(self._json.get("decoder")))
        kinds = {str(step.get("type")) for step in steps}
        table = [b""] * self.vocab_size
        if not kinds:  # without a decoder, the library joins words by spaces
            for piece, token_id in self._vocab.items():
                table[token_id] = f" {piece}".encode()
        elif "ByteLevel" in kinds:
            for piece, token_id in self._vocab.items():
                # Added tokens are text as they stand, even where they look like stand-ins.
                added = token_id in self._added
                table[token_id] = piece.encode() if added else _byte_level(piece)
        elif kinds and kinds <= SENTENCEPIECE and all(_is_space_mark(step) for step in steps):
            for piece, token_id in self._vocab.items():
                match = BYTE_PIECE.fullmatch(piece) if "ByteFallback" in kinds else None
                text = piece.replace(SPACE_MARK, " ")
                table[token_id] = bytes([int(match[1], 16)]) if match else text.encode()
        else:
            raise JobError(
                "unsupported_model",
                f"{self._path}: unsupported decoder {sorted(kinds)}; supported: "
                "none, ByteLevel, and SentencePiece's (Replace, ByteFallback, Fuse, Strip, "
                f"Metaspace, with {SPACE_MARK} for a space)",
            )
        return table


def _steps(decoder: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _is_space_mark(step: dict[str, Any]) -> bool:
    """Whether a step that writes spaces does so for SentencePiece's mark."""
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
    return step.get("type") != "Metaspace" or step.get("replacement") == SPACE_MARK


def _alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character → byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


_BYTES = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:
        return piece.encode()
