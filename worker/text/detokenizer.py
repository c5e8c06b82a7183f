"""Incremental detokenizer: token ids → text that never splits a character and never changes.

The concatenated output equals what `tokenizers` decodes from the whole sequence, by default without
its special tokens. Tokens of a byte-level tokenizer are bytes, decoded as UTF-8 with U+FFFD for
each maximal invalid part. SentencePiece tokens are text, with byte tokens for characters outside
the vocabulary: a run of byte tokens decodes to text if the whole run is valid UTF-8, else to one
U+FFFD per byte, so a run is held back until it ends.

A completion keeps the space that begins its first word, unless the tokenizer's decoder drops the
leading space of a text (Llama 2). The encoder of such a tokenizer prepends a space to every text,
and its chat template writes the space before an assistant message itself; a completion that is sent
back as a message therefore gives the same prompt tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from worker.checkpoint.tokenizer import SPACE_MARK, Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of one sequence, with or without its special tokens. `shown`: special tokens that
    are never left out."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: Collection[str] = ()
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._shown = {tokenizer.id_of(token) for token in shown}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # bytes of consecutive byte tokens
        self._at_start = True  # no text has been returned yet

    def push(self, token_id: int) -> str:
        """The text that the token completes; empty for a special token that is skipped."""
        tokenizer = self._tokenizer
        skipped = self._skip_special and token_id not in self._shown
        if skipped and tokenizer.is_special(token_id):
            return ""
        if tokenizer.byte_level:
            return self._utf8.decode(tokenizer.token_bytes(token_id))
        byte = tokenizer.single_byte(token_id)
        if byte is not None:
            self._run += byte
            return ""
        before = self._end_run()
        return before + self._spaced(tokenizer.text(token_id))

    def finish(self) -> str:
        """The text still held back at the end of the sequence."""
        return self._end_run() + self._utf8.decode(b"", final=True)

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = REPLACEMENT * len(run)
        return self._spaced(text) if text else ""

    def _spaced(self, text: str) -> str:
        """The text with each ▁ as a space; the decoder may drop leading ones."""
        at_start, self._at_start = self._at_start, self._at_start and not text
        if self._tokenizer.metaspace is not None:
            return text.replace(SPACE_MARK, self._tokenizer.metaspace if at_start else " ")
        strip = at_start and self._tokenizer.strips_first_space
        return text.removeprefix(" ") if strip else text
