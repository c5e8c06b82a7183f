"""Separates tool calls from the text of a completion.

A call is returned when it is complete and well-formed; until then its text is held back. Text that
turns out to be no call is returned as text. Without calls, the text is the same as without a
parser. White space between a call and the beginning or end of the completion is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from worker.text.tool_call import WHITESPACE, Block, Call, Functions, Malformed, Syntax, Unfinished
from worker.text.tool_json import Hermes, LlamaJson
from worker.text.tool_python import Pythonic
from worker.text.tool_xml import QwenXml

logger = logging.getLogger(__name__)

# By the names that vLLM gives its parsers.
SYNTAXES: dict[str, Callable[[Functions], Syntax]] = {
    "hermes": lambda _: Hermes(),
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "qwen3_coder": QwenXml,
}
MAX_CALL = 2**17  # characters of a call, or of the calls of one list; longer ones stay text
# A call is read again while it grows. These limits keep the time linear in the length of the text.
EAGER_CHARACTERS = 256  # read whenever some are added, to show at once what is not a call
WINDOW = 64  # last characters in which a closing is looked for
READS = 64  # number of readings after which the text must have grown by GROWTH
GROWTH = 1.1
PIECE_CHARACTERS = 1024  # added at once


class _Guarded:
    """A syntax that finds no more calls after an error of its own, so that no text is lost."""

    def __init__(self, syntax: Syntax) -> None:
        self.closings, self.separators = syntax.closings, syntax.separators
        self._syntax: Syntax | None = syntax

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        if self._syntax is not None:
            try:
                return self._syntax.find(text, at, blank)
            except Exception:
                self._give_up()
        return len(text), False

    def read(self, text: str, at: int, *, final: bool) -> Block:
        if self._syntax is not None:
            try:
                return self._syntax.read(text, at, final=final)
            except (Malformed, Unfinished):
                raise
            except Exception:
                self._give_up()
        raise Malformed

    def _give_up(self) -> None:
        self._syntax = None
        logger.exception("tool calls could not be read: the rest of this answer stays text")


class ToolParser:
    """Incremental parser for the content of one completion. The result does not depend on how the
    text is cut into pieces."""

    def __init__(self, syntax: Syntax) -> None:
        self.markers = syntax.markers
        self._syntax = _Guarded(syntax)
        self._text, self._at = "", 0  # what follows _at may be a call, or the beginning of one
        self._inside = False  # a call may begin at _at
        self._seen = self._reads = 0  # length of the call at the last reading, and their number
        self._new: list[str] = []  # text after _text that was not worth reading
        self._length = 0  # of _text and _new
        self._closes = False  # a closing is in _new
        self._blank: list[str] = []  # white space that is shown only if text follows
        self._has_text = self._after_call = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; returns the content and the calls that no later text can change."""
        shown: list[str] = []
        calls: list[Call] = []
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            if self._is_worth_reading(piece):
                more, found = self._scan(final=False)
                shown.append(more)
                calls += found
        return "".join(shown), calls

    def flush(self) -> tuple[str, list[Call]]:
        """The text and calls that are still held back at the end of the completion."""
        text, calls = self._scan(final=True)
        if not self._after_call:
            text += "".join(self._blank)
        return text, calls

    def _is_worth_reading(self, piece: str) -> bool:
        """Add a piece of text; returns whether a call could be found, or refused, with it."""
        before = (self._new[-1] if self._new else self._text)[-WINDOW:]
        self._new.append(piece)
        self._length += len(piece)
        if not self._inside or self._length <= EAGER_CHARACTERS or self._length >= MAX_CALL:
            return True
        end = before + piece
        self._closes = self._closes or any(closing in end for closing in self._syntax.closings)
        if not self._closes:
            return False
        self._reads += 1
        return self._reads <= READS or self._length >= self._seen * GROWTH

    def _scan(self, *, final: bool) -> tuple[str, list[Call]]:
        self._text = self._text[self._at :] + "".join(self._new)
        self._at, self._new, self._closes = 0, [], False
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            if not self._inside:
                blank = None if self._has_text else self._blanks
                at, found = self._syntax.find(self._text, self._at, blank)
                shown.append(self._show(at if found or not final else len(self._text)))
                if not found:
                    break
                self._inside, self._reads = True, 0
            try:
                block = self._read(final=final)
            except Unfinished:
                self._seen = len(self._text) - self._at
                break
            except Malformed as error:
                self._inside = False
                shown.append(self._show(error.end or self._at + 1))
            else:
                calls += block.calls
                self._at, self._inside, self._after_call = block.end, False, True
        self._length = len(self._text) - self._at
        return "".join(shown), calls

    def _read(self, *, final: bool) -> Block:
        """The calls at _at. Raises Unfinished if more text may make it a call, else Malformed."""
        end = self._at + MAX_CALL
        try:
            if len(self._text) < end:
                return self._syntax.read(self._text, self._at, final=final)
            return self._syntax.read(self._text[:end], self._at, final=False)
        except Unfinished:
            if len(self._text) >= end:
                raise Malformed(end) from None
            if final:
                raise Malformed from None
            raise

    @property
    def _blanks(self) -> str:
        return WHITESPACE + self._syntax.separators if self._after_call else WHITESPACE

    def _show(self, end: int) -> str:
        """Move _at to `end`; returns what of the text between is certain to be shown."""
        text, self._at = self._text[self._at : end], end
        bare = text.rstrip(self._blanks)
        if not bare:
            self._blank.append(text)
            return ""
        shown = "".join(self._blank) + bare
        self._blank = [text[len(bare) :]]
        if self._after_call and not self._has_text:
            shown = shown.lstrip(self._blanks)
        self._has_text, self._after_call = True, False
        return shown
