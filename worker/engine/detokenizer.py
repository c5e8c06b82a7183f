"""Token ids → text, as they come: never half a character, never taken back.

The text of a completion is the UTF-8 reading of its tokens' bytes; what is not UTF-8 reads as
U+FFFD. A completion follows a prompt, so the space that begins its first word belongs to it, unless
the tokenizer's own decoder drops the first space of a text.
"""

from __future__ import annotations

import codecs

from worker.loading.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """What the token adds to the text that is certain now; special tokens add nothing."""
        if self._tokenizer.is_special(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip and raw:
            self._strip = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """What an incomplete character at the end reads as."""
        return self._decoder.decode(b"", final=True)
