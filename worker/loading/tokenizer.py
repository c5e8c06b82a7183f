"""The checkpoint's tokenizer: text → ids by `tokenizers`, ids → bytes or text by tables of our own,
which make streaming possible.
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

from jobs.errors import JobError
from worker.loading.config import present, read_json

FILE, CONFIG, MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """Encodes and decodes; knows special tokens and the bytes of every id."""

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        if not present(path):
            raise JobError(
                "model_not_found",
                f"{folder} has no {FILE}: download the model again, or convert its tokenizer with "
                "the tokenizers library",
            )
        self._folder, self._path = folder, path
        self.config: dict[str, Any] = read_json(folder / CONFIG) if present(folder / CONFIG) else {}
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
        self._kinds = {str(step.get("type")) for step in _steps(values.get("decoder"))}
        self._check_decoder()
        # Of a byte-level tokenizer all ids, of another those that stand for a single byte.
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        for piece, token_id in self._vocab.items():
            if self.byte_level:
                self._bytes[token_id] = _byte_level(piece)
            elif "ByteFallback" in self._kinds and (match := BYTE_PIECE.fullmatch(piece)):
                self._bytes[token_id] = bytes([int(match[1], 16)])
            else:
                self._texts[token_id] = self._text_of(piece)

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

    def text(self, token_id: int) -> str:
        """What the token adds to the text, where tokens are text; a Metaspace's marks stay marks.
        Nothing for ids that the model has and the tokenizer doesn't."""
        return self._texts.get(token_id, "")

    def single_byte(self, token_id: int) -> bytes | None:
        """The byte that the token stands for among tokens that are text, such as <0x0A>."""
        return None if self.byte_level else self._bytes.get(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text, as UTF-8 bytes; a part of a character is possible."""
        raw = self._bytes.get(token_id)
        return self.text(token_id).replace(SPACE_MARK, " ").encode() if raw is None else raw

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max((len(self.token_bytes(i)) for i in self._vocab.values()), default=0)

    @property
    def byte_level(self) -> bool:
        """Whether tokens are bytes, put together before they are read as UTF-8."""
        return "ByteLevel" in self._kinds

    @cached_property
    def metaspace(self) -> str | None:
        """What a mark in the first token of a text reads as, where the decoder is Metaspace: it
        drops it, or not."""
        for step in _steps(self._json.get("decoder")):
            if step.get("type") == "Metaspace":
                return " " if step.get("prepend_scheme", "always") == "never" else ""
        return None

    @cached_property
    def strips_first_space(self) -> bool:
        """Whether the decoder drops one space at the very start of a text (Llama 2).

        Such tokenizers put a space before every text that they read, and no other sign says that
        a word begins: what a model writes after `[/INST]` starts with it.
        """
        return not self._kinds or "Strip" in self._kinds

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """bos_token, eos_token and the like by name, as chat templates use them.

        As transformers has it: special_tokens_map.json counts before a tokenizer_config.json of the
        time before added_tokens_decoder; extra_special_tokens are named by the model."""
        named: dict[str, Any] = {name: self.config.get(name) for name in NAMED}
        if "added_tokens_decoder" not in self.config and present(self._folder / MAP):
            given = read_json(self._folder / MAP)
            named |= {name: given[name] for name in NAMED if name in given}
        extra = self.config.get("extra_special_tokens")
        if isinstance(extra, dict):
            named |= extra
        tokens = {}
        for name, value in named.items():
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
        return tokens

    def _check_decoder(self) -> None:
        steps = list(_steps(self._json.get("decoder")))
        good = self._kinds <= SENTENCEPIECE and all(map(_is_space_mark, steps))
        if self._kinds - {"ByteLevel"} and (not good or _strips_before_it_fuses(steps)):
            raise JobError(
                "unsupported_model",
                f"{self._path}: unsupported decoder {sorted(self._kinds)}; supported: none, "
                "ByteLevel, and SentencePiece's (Replace, ByteFallback, Fuse, Strip after Fuse, "
                f"Metaspace, with {SPACE_MARK} for a space)",
            )

    def _text_of(self, piece: str) -> str:
        """A piece as this tokenizer's decoder spells it; Metaspace's marks stay."""
        if not self._kinds:  # without a decoder, the library joins words by spaces
            return f" {piece}"
        return piece.replace(SPACE_MARK, " ") if "Replace" in self._kinds else piece


def _steps(decoder: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _strips_before_it_fuses(steps: Sequence[dict[str, Any]]) -> bool:
    """Whether spaces are stripped from every token, not from the whole text."""
    kinds = [step.get("type") for step in steps]
    return "Strip" in kinds and "Fuse" not in kinds[: kinds.index("Strip")]


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
