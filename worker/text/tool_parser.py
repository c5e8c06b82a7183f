"""Separates tool calls from the text of a completion.

A call is returned when it is complete and well-formed; until then its text is held back. What turns
out not to be a call stays text. Without calls, the text is the same as without a parser. White
space between a call and the beginning or end of the completion is left out.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.text.tool_call import WHITESPACE, Call, Functions, Malformed, Syntax, Unfinished
from worker.text.tool_json import Hermes, LlamaJson
from worker.text.tool_python import Pythonic
from worker.text.tool_xml import QwenXml

# By the names that vLLM gives its parsers.
SYNTAXES: dict[str, Callable[[Functions], Syntax]] = {
    "hermes": lambda _: Hermes(),
    "llama3_json": LlamaJson,
    "pythonic": Pythonic,
    "qwen3_coder": QwenXml,
}
# A call is read again while it grows. These limits keep the time linear in its length.
SHORT = 256  # characters that are read whenever some are added, to show what is not a call at once
WINDOW = 64  # last characters in which a closing is looked for
READS = 64  # number of readings after which the text must have grown by GROWTH
GROWTH = 1.1


class ToolParser:
    """Incremental parser for the content of one completion. The result does not depend on how the
    text is cut into pieces."""

    def __init__(self, syntax: Syntax) -> None:
        self.markers = syntax.markers
        self._syntax = syntax
        self._held = ""  # text that may be a call, or the beginning of one
        self._inside = False  # _held begins where a call begins
        self._seen = self._reads = 0  # length of _held at the last reading, and their number
        self._blank = ""  # white space that is shown only if text follows
        self._has_text = self._after_call = False

    def push(self, text: str) -> tuple[str, list[Call]]:
        """Add text; returns the content and the calls that no later text can change."""
        self._held += text
        return self._scan(final=False)

    def flush(self) -> tuple[str, list[Call]]:
        """What is still held back at the end of the completion."""
        text, calls = self._scan(final=True)
        if not self._after_call:
            text += self._blank
        return text, calls

    def _scan(self, *, final: bool) -> tuple[str, list[Call]]:
        shown: list[str] = []
        calls: list[Call] = []
        while True:
            if not self._inside:
                blank = None if self._has_text else self._blanks
                at, found = self._syntax.find(self._held, blank)
                shown.append(self._show(at if found or not final else len(self._held)))
                if not found:
                    break
                self._inside, self._seen, self._reads = True, 0, 0
            if not (final or self._is_worth_reading()):
                break
            try:
                block = self._syntax.read(self._held, final=final)
            except Unfinished:
                if not final:
                    self._seen = len(self._held)
                    break
                shown.append(self._refuse())
            except Malformed:
                shown.append(self._refuse())
            else:
                calls += block.calls
                self._held, self._inside = self._held[block.end :], False
                self._after_call = True
        return "".join(shown), calls

    def _is_worth_reading(self) -> bool:
        length = len(self._held)
        if length <= SHORT or not self._seen:
            return True
        end = self._held[max(0, self._seen - WINDOW) :]
        if not any(closing in end for closing in self._syntax.closings):
            return False
        self._reads += 1
        return self._reads <= READS or length >= self._seen * GROWTH

    @property
    def _blanks(self) -> str:
        return WHITESPACE + self._syntax.separators if self._after_call else WHITESPACE

    def _refuse(self) -> str:
        """Show the first character of what is not a call; another call may begin right after it."""
        self._inside = False
        return self._show(1)

    def _show(self, length: int) -> str:
        """Remove text from _held; returns what of it is certain to be shown."""
        text, self._held = self._held[:length], self._held[length:]
        bare = text.rstrip(self._blanks)
        if not bare:
            self._blank += text
            return ""
        before, self._blank = self._blank, text[len(bare) :]
        shown = before + bare
        if self._after_call and not self._has_text:
            shown = shown.lstrip(self._blanks)
        self._has_text, self._after_call = True, False
        return shown
