"""A model's tokenizer: encodes with the `tokenizers` library, and keeps tables of the bytes or text
of every token, which streaming needs.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HubTokenizer

from jobs.errors import JobError, failure_of, invalid
from worker.checkpoint import bpe
from worker.checkpoint.files import parse_object

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """Encodes and decodes text; knows which tokens are special and the bytes of every token.

    `source` is the content of a tokenizer.json, or such values of a BPE tokenizer whose added
    tokens are in its vocabulary; `path` the file, named in errors. Raises
    JobError("unsupported_model").
    """

    def __init__(self, source: str | dict[str, Any], path: Path) -> None:
        self._path = path
        if isinstance(source, str):
            self.hash = hashlib.sha256(source.encode()).hexdigest()[:32]
            self._build(parse_object(source, path), source)
        else:
            self._build(source)
            self.hash = bpe.digest(source)[:32]

    def _build(self, values: dict[str, Any], text: str | None = None) -> None:
        try:
            self._inner = bpe.build(values) if text is None else HubTokenizer.from_str(text)
        except BaseException as error:  # the library raises bare Exception, and panics
            reason = " ".join(failure_of(error).message.removeprefix("Exception: ").split())
            raise JobError(
                "unsupported_model",
                f"{self._path} is not a tokenizer: {reason}; download the model again",
            ) from None
        # tokenizer.json may hold the truncation and padding of a training run.
        self._inner.no_truncation()
        self._inner.no_padding()
        self._json = values
        self._added = {entry["id"]: entry for entry in values.get("added_tokens") or []}
        vocab: dict[str, int] = (
            values["model"]["vocab"]
            if text is None
            else self._inner.get_vocab(with_added_tokens=True)
        )
        # Highest id + 1: ids may have gaps.
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self._kinds = {str(step.get("type")) for step in _steps(values.get("decoder"))}
        self._check_decoder()
        self._pieces = {token_id: piece for piece, token_id in vocab.items()}
        self._known_bytes: dict[int, bytes] = {}  # of the tokens that were asked for

    def limited_to(self, vocab_size: int) -> Tokenizer:
        """This tokenizer without the special tokens whose ids the model doesn't have: the files of
        a text model may define an image token. Raises JobError if other ids are out of range."""
        if self.vocab_size <= vocab_size:
            return self
        values = dict(self._json)
        values["added_tokens"] = [
            entry
            for entry in values.get("added_tokens") or []
            if entry["id"] < vocab_size or not entry.get("special")
        ]
        limited = copy(self)
        limited._build(values, json.dumps(values))
        if limited.vocab_size > vocab_size:
            raise JobError(
                "unsupported_model",
                f"{self._path} has {self.vocab_size} tokens and the model's vocabulary only "
                f"{vocab_size}: tokenizer and weights don't match; download the model again",
            )
        return limited

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. Special tokens in the text are parsed as special tokens. Raises
        JobError("invalid_request") for a text that has none."""
        check_unicode(text)
        try:
            ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:  # the library panics
            raise not_encodable(failure_of(error).message) from None
        return ids

    def added_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        inner = self.encode("a")
        whole = self.encode("a", add_special_tokens=True)
        starts = range(len(whole) - len(inner) + 1)
        at = next((n for n in starts if whole[n : n + len(inner)] == inner), 0)
        return whole[:at], whole[at + len(inner) :]

    def to_json(self) -> str:
        """The content of its tokenizer.json, on one line."""
        return json.dumps(self._json)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token."""
        found: int | None = self._inner.token_to_id(token)
        return found

    def piece(self, token_id: int) -> str | None:
        """The token of an id as the vocabulary writes it."""
        found: str | None = self._inner.id_to_token(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """True if the id is a control token, which is left out of text."""
        entry = self._added.get(token_id)
        return bool(entry and entry.get("special"))

    def text(self, token_id: int) -> str:
        """Text of a SentencePiece token, with each ▁ kept under Metaspace. Empty for ids that only
        the model has."""
        piece = self._pieces.get(token_id)
        return "" if piece is None or self._raw(piece) is not None else self._text_of(piece)

    def single_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token, such as <0x0A>."""
        piece = self._pieces.get(token_id)
        return None if piece is None or self.byte_level else self._raw(piece)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of the token, possibly only a part of a character."""
        known = self._known_bytes.get(token_id)
        if known is None:
            known = self._known_bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            return b""
        raw = self._raw(piece)
        return self._text_of(piece).replace(SPACE_MARK, " ").encode() if raw is None else raw

    @cached_property
    def longest_token(self) -> int:
        """Length of the longest token in bytes."""
        longest = 0
        for token_id, piece in self._pieces.items():
            # A shorter piece can't be the longest token, so few are converted.
            if len(piece.encode()) >= longest:
                longest = max(longest, len(self.token_bytes(token_id)))
        return longest

    @property
    def byte_level(self) -> bool:
        """True if tokens are byte sequences, which are concatenated and then decoded as UTF-8."""
        return "ByteLevel" in self._kinds

    @cached_property
    def metaspace(self) -> str | None:
        """Text for a leading ▁ under Metaspace: "" or " ". None: the decoder isn't Metaspace."""
        for step in _steps(self._json.get("decoder")):
            if step.get("type") == "Metaspace":
                return " " if step.get("prepend_scheme", "always") == "never" else ""
        return None

    @cached_property
    def strips_first_space(self) -> bool:
        """True if the decoder drops one leading space of a text (Llama 2).

        The encoder of such a tokenizer prepends a space to every text, so a completion starts with
        the space that begins its first word.
        """
        return not self._kinds or "Strip" in self._kinds

    def _check_decoder(self) -> None:
        steps = list(_steps(self._json.get("decoder")))
        supported = self._kinds <= SENTENCEPIECE and all(map(_replaces_space_mark, steps))
        if self._kinds - {"ByteLevel"} and (not supported or _strips_before_fuse(steps)):
            raise JobError(
                "unsupported_model",
                f"{self._path}: unsupported decoder {sorted(self._kinds)}; supported: none, "
                "ByteLevel, and SentencePiece's (Replace, ByteFallback, Fuse, Strip after Fuse, "
                f"Metaspace, with {SPACE_MARK} for a space)",
            )

    def _raw(self, piece: str) -> bytes | None:
        """Bytes of a byte-level token, or of a byte-fallback token such as <0x0A>."""
        if self.byte_level:
            return _byte_level(piece)
        match = BYTE_PIECE.fullmatch(piece) if "ByteFallback" in self._kinds else None
        return bytes([int(match[1], 16)]) if match else None

    def _text_of(self, piece: str) -> str:
        """Text of a vocabulary entry; each ▁ is kept under Metaspace."""
        if not self._kinds:  # without a decoder, the library joins tokens with spaces
            return f" {piece}"
        return piece.replace(SPACE_MARK, " ") if "Replace" in self._kinds else piece


def check_unicode(text: str) -> None:
    """Raise JobError("invalid_request") for a lone surrogate, which JSON can carry."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(
            "the text contains half a character (a lone surrogate): send valid Unicode", "messages"
        ) from None


def not_encodable(reason: str) -> JobError:
    """The error of a text that makes the library fail, such as millions of spaces in a row."""
    return invalid(
        f"the model's tokenizer can't encode this text ({reason}): remove long runs of one "
        "character, such as white space",
        "messages",
    )


def _steps(decoder: Any) -> Iterable[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _steps(inner)]
    return [decoder]


def _strips_before_fuse(steps: Sequence[dict[str, Any]]) -> bool:
    """True if Strip applies to every token instead of the whole text."""
    kinds = [step.get("type") for step in steps]
    return "Strip" in kinds and "Fuse" not in kinds[: kinds.index("Strip")]


def _replaces_space_mark(step: dict[str, Any]) -> bool:
    """True if a decoder step that inserts spaces replaces exactly ▁ with them."""
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": SPACE_MARK} and step.get("content") == " "
    return step.get("type") != "Metaspace" or step.get("replacement") == SPACE_MARK


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable characters for the 256 bytes: character → byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + index): byte for index, byte in enumerate(others)},
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level(piece: str) -> bytes:
    """Bytes of a byte-level token; an added token may hold plain text instead."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:
        return piece.encode()
