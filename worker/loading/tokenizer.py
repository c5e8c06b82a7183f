"""The checkpoint's tokenizer: text → ids by `tokenizers`, ids → bytes by a table of our own.

The table makes streaming exact: what a token adds is its bytes, whatever came before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from jobs.types import JobError
from worker.loading.config import read_json

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


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
        self._json = read_json(path)
        try:
            self._inner = HubTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise JobError("unsupported_model", f"{path} is not a tokenizer: {error}") from None
        self.config: dict[str, Any] = (
            read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
        )
        self.hash = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        self._path = path
        self._added = {entry["id"]: entry for entry in self._json.get("added_tokens") or []}

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

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
        """What the token adds to the text, as UTF-8 bytes; a part of a character is possible."""
        return self._table[token_id]

    @property
    def strips_first_space(self) -> bool:
        """Whether the decoder drops one space at the very start of a text."""
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

    @cached_property
    def _table(self) -> list[bytes]:
        convert = self._piece_converter()
        table = [b""] * self.vocab_size
        for piece, token_id in self._inner.get_vocab(with_added_tokens=True).items():
            entry = self._added.get(token_id)
            table[token_id] = entry["content"].encode() if entry else convert(piece)
        return table

    def _piece_converter(self) -> Any:
        """How this tokenizer's pieces spell bytes, by its decoder."""
        kinds = {str(step.get("type")) for step in _steps(self._json.get("decoder"))}
        if "ByteLevel" in kinds:
            return _byte_level
        if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
            return _sentencepiece
        raise JobError(
            "unsupported_model",
            f"{self._path}: unsupported decoder {sorted(kinds) or 'none'}; supported: ByteLevel, "
            "and SentencePiece's (Replace, ByteFallback, Fuse, Strip, Metaspace)",
        )


def _steps(decoder: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


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


def _sentencepiece(piece: str) -> bytes:
    match = BYTE_PIECE.fullmatch(piece)
    if match:
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()
