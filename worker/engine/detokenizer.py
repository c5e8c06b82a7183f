"""Token ids → text, as they come: never half a character, never taken back.

The text of a completion is the UTF-8 reading of its tokens' bytes; what is not UTF-8 reads as
U+FFFD (the Unicode standard's reading: one for each longest broken part of a character).

The space that begins its first word belongs to a completion, unless the tokenizer's own decoder
drops the first space of a text. Such a decoder (Llama 2) stands beside an encoder that puts a space
before every text, and chat templates write that space themselves before an assistant's words: so
the answer, sent back as a message, makes the prompt that the model has seen. This is also what
decoding the completion's ids alone gives; only that space goes, those in front of later words stay.
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
