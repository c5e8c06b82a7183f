"""Tool calls as Python or JSON, in fenced code or as the whole answer (Gemma 3, Llama 3.2).

Gemma 3 has no tokens for tools: it follows the prompt. Google's documentation asks for
`[name(key=value), …]` or for `{"name": …, "parameters": {…}}`, and the models often write them, or
plain calls, into fenced code with the language `tool_code` or `json`.
"""

from __future__ import annotations

import re
from typing import Any

from worker.text.tool_call import (
    MAX_DEPTH,
    Block,
    Call,
    Functions,
    Malformed,
    Openings,
    Unfinished,
    after_any,
    after_blank,
    after_closing,
    after_short_blank,
    call_of,
    object_opens,
    read_json,
    to_call,
)

FENCE = "```"
FENCES = ("```tool_code", "```json")
PRINT = "print"  # models may print the result of a call
MAX_PRINTS = 8  # calls of print around a call
MAX_CALLS = 128  # in one list or fence; longer lists stay text
_OPENINGS = Openings(*FENCES)
_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[^\W\d][\w.-]*")
_KEY = re.compile(r"([^\W\d]\w*)\s*=(?!=)")
_TEXT = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_CONSTANTS = {"True": True, "False": False, "None": None}
_CONSTANTS |= {"true": True, "false": False, "null": None}
# The end of a text that cuts a word, a fence or a string.
_CUT = re.compile(r"[\w.+-]*\s*|`{1,2}|'(?:[^'\\\n]|\\.)*\\?|\"(?:[^\"\\\n]|\\.)*\\?", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|[\n\\'\"abfnrtv0])")
_ESCAPED = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f"}
_ESCAPED |= {"n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0"}


class Pythonic:
    """`[name(key=value), …]` or JSON as the whole answer, or fenced code anywhere, whose calls need
    no list. Only calls of the request's functions count."""

    closings = ("]", "}", FENCE)
    separators = ""
    markers = ()

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._names = tuple(f"{name}(" for name in (*functions, PRINT))
        self._longest = max(map(len, self._names))

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        start = at if blank is None else after_any(text, at, blank)
        if blank is not None and text.startswith(("{", "["), start):
            opens = self._opens(text, start)
            if opens is not False:
                return start, opens is True
        return _OPENINGS.find(text, start)

    def read(self, text: str, at: int, *, final: bool) -> Block:
        if not text.startswith(FENCE, at):
            return Block(*self._calls(text, at, final=final))
        code = at + max(len(fence) for fence in FENCES if text.startswith(fence, at))
        if text[code : code + 1].strip():
            raise Malformed  # the name of another language
        start = after_short_blank(text, code)
        opens = None if start is None else self._opens(text, start)
        if start is None or opens is None:
            raise Unfinished
        if not opens:
            raise Malformed
        calls, end = self._calls(text, start, final=final)
        closed = after_closing(text, end, FENCE, final=final)
        if closed is None:
            raise Malformed
        return Block(calls, closed)

    def _opens(self, text: str, at: int) -> bool | None:
        """Whether calls begin at a place in a text; None: this depends on the text to come."""
        if text.startswith("[", at):
            try:
                inner = after_short_blank(text, at + 1)
            except Malformed:
                return False
            if inner is None:
                return None
            at = inner
        if text.startswith("{", at):
            return object_opens(text, at)
        if text.startswith(self._names, at):
            return True
        rest = text[at : at + self._longest]
        return None if any(opening.startswith(rest) for opening in self._names) else False

    def _calls(self, text: str, start: int, *, final: bool) -> tuple[tuple[Call, ...], int]:
        """The calls at a place in a text, and their end."""
        first = after_blank(text, start + 1) if text.startswith("[", start) else start
        if not text.startswith("{", first):
            reader = _Reader(text, start)
            return reader.calls(self._functions, final=final), reader.at
        value, end = read_json(text, start)
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_CALLS:
            raise Malformed
        return tuple(call_of(one, self._functions) for one in values), end


def parse_literal(text: str) -> Any:
    """The value of a Python literal: text, number, list, tuple, dict or constant. Raises
    Malformed."""
    reader = _Reader(text, 0)
    try:
        value = reader.value()
    except Unfinished:
        raise Malformed from None
    if text[reader.at :].strip():
        raise Malformed
    return value


class _Reader:
    """Reads calls with literal arguments. Python's own parser is not for untrusted text: it may
    exhaust the stack. Raises Malformed, or Unfinished at the end of the text."""

    def __init__(self, text: str, at: int) -> None:
        self._text, self.at = text, at

    def calls(self, functions: Functions, *, final: bool) -> tuple[Call, ...]:
        """A list of calls, or calls on lines of their own up to a fence; at the end of the answer,
        the fence may be missing."""
        found: list[Call] = []
        if self._take("["):
            while True:
                self._add_call(found, functions)
                if self._ends_items("]"):
                    return tuple(found)
        while not self._text.startswith(FENCE, self._after_blank()):
            at = self._after_blank()
            if found and final and FENCE.startswith(self._text[at : at + len(FENCE)]):
                break
            self._add_call(found, functions)
            self._take(";")
        return tuple(found)

    def value(self, depth: int = MAX_DEPTH) -> Any:
        if not depth:
            raise Malformed
        if self._take("["):
            return self._items("]", depth)
        if self._take("("):
            return self._items(")", depth)
        if self._take("{"):
            return self._entries(depth)
        if text := self._match(_TEXT):
            return _unescaped(text[1] if text[1] is not None else text[2])
        if number := self._match(_NUMBER):
            try:
                return int(number[0])
            except ValueError:
                return float(number[0])
        name = self._match(_NAME)
        if name is None or name[0] not in _CONSTANTS:
            raise self._fault()
        return _CONSTANTS[name[0]]

    def _add_call(self, found: list[Call], functions: Functions) -> None:
        if len(found) == MAX_CALLS:
            raise Malformed
        found.append(self._call(functions))

    def _call(self, functions: Functions, prints: int = MAX_PRINTS) -> Call:
        name = self._match(_NAME)
        if name is None:
            raise self._fault()
        self._need("(")
        if name[0] == PRINT and PRINT not in functions:
            if not prints:
                raise Malformed
            call = self._call(functions, prints - 1)
            self._need(")")
            return call
        if name[0] not in functions:
            raise Malformed
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            key = self._match(_KEY)
            if key is None:
                raise self._fault()
            if key[1] in arguments:
                raise Malformed
            arguments[key[1]] = self.value()
            if self._ends_items(")"):
                break
        return to_call(name[0], arguments)

    def _items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take(closing):
            items.append(self.value(depth - 1))
            if self._ends_items(closing):
                break
        return items

    def _entries(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value(depth - 1)
            self._need(":")
            if not isinstance(key, str) or key in entries:
                raise Malformed
            entries[key] = self.value(depth - 1)
            if self._ends_items("}"):
                break
        return entries

    def _ends_items(self, closing: str) -> bool:
        """Read what follows an item: the closing bracket, or a comma and maybe the bracket."""
        if not self._take(","):
            self._need(closing)
            return True
        return self._take(closing)

    def _after_blank(self) -> int:
        blank = _BLANK.match(self._text, self.at)
        assert blank is not None
        return blank.end()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What matches after white space."""
        found = pattern.match(self._text, self._after_blank())
        if found is not None:
            self.at = found.end()
        return found

    def _take(self, character: str) -> bool:
        at = self._after_blank()
        taken = self._text.startswith(character, at)
        if taken:
            self.at = at + 1
        return taken

    def _need(self, character: str) -> None:
        if not self._take(character):
            raise self._fault()

    def _fault(self) -> Malformed | Unfinished:
        """The error for what doesn't match at the present place: the text may end there, within a
        word, or within a string."""
        cut = _CUT.fullmatch(self._text, self._after_blank())
        return Unfinished() if cut else Malformed()


def _unescaped(text: str) -> str:
    def value(found: re.Match[str]) -> str:
        escape = found[1]
        return _ESCAPED[escape] if escape in _ESCAPED else chr(int(escape[1:], 16))

    return _ESCAPE.sub(value, text)
