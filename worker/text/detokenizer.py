"""Token ids → text, as they come: never half a character, never taken back.

All pieces together are what `tokenizers` decodes from the whole sequence, special tokens left out.
A byte-level tokenizer's bytes are read as UTF-8; what is none reads as U+FFFD (one for each longest
broken part of a character). SentencePiece's are text, and bytes where a character has no piece: a
run of those is one text if all of it is UTF-8, else one U+FFFD for each of its bytes. So a run is
held until it ends.

The space that begins its first word belongs to a completion, unless the tokenizer's own decoder
drops the first space of a text. Such a decoder (Llama 2) stands beside an encoder that puts a space
before every text, and chat templates write that space themselves before an assistant's words: so
the answer, sent back as a message, makes the prompt that the model has seen.
"""

from __future__ import annotations

import codecs

from worker.loading.tokenizer import SPACE_MARK, Tokenizer

BROKEN = "\ufffd"


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # single bytes that have come one after the other
        self._begins = True  # no text has come yet

    def push(self, token_id: int) -> str:
        """What the token adds to the text that is certain now; special tokens add nothing."""
        tokenizer = self._tokenizer
        if tokenizer.is_special(token_id):
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
        """What is left at the end."""
        return self._end_run() + self._utf8.decode(b"", final=True)

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            text = run.decode()
        except UnicodeDecodeError:
            text = BROKEN * len(run)
        return self._spaced(text) if text else ""

    def _spaced(self, text: str) -> str:
        """The text as it is shown: marks are spaces, and the first ones may go."""
        begins, self._begins = self._begins, self._begins and not text
        if self._tokenizer.metaspace is not None:
            return text.replace(SPACE_MARK, self._tokenizer.metaspace if begins else " ")
        return text.removeprefix(" ") if begins and self._tokenizer.strips_first_space else text
