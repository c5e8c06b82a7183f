"""Tool calls as Python or JSON, in fenced code or as the whole answer (Gemma 3, Llama 3.2).

Gemma 3 has no tokens for tools: it follows the prompt. Google's documentation asks for
`[name(key=value), …]` or for `{"name": …, "parameters": {…}}`, and the models often write them, or
plain calls, into fenced code with the language `tool_code` or `json`.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from worker.text.tool_call import (
    MAX_ARGUMENT_DEPTH,
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
# One string literal: in three quotes or in one, up to its end or to the end of the text.
_OPEN_3 = r"{0}{0}{0}(?:[^{0}\\]|\\.|{0}(?!{0}{0}))*+"
_OPEN_1 = r"{0}(?!{0}{0})(?:[^{0}\\\n]|\\.)*+"
_QUOTED = "|".join(
    one.format(quote) + end * quote for quote in "'\"" for one, end in ((_OPEN_3, 3), (_OPEN_1, 1))
)
_OPEN = "|".join(one.format(quote) for quote in "'\"" for one in (_OPEN_3, _OPEN_1))
_TEXT = re.compile(rf"[rRuU]?(?:{_QUOTED})", re.DOTALL)
_NUMBER = re.compile(
    r"([-+]?)\s*(0[xX][\da-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+"
    r"|(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d[\d_]*)?)"
)
_CONSTANTS = {"True": True, "False": False, "None": None}
_CONSTANTS |= {"true": True, "false": False, "null": None}
# The end of a text that cuts a word, a fence or a string.
_CUT = re.compile(rf"[\w.+-]*\s*|`{{1,2}}|[rRuU]?(?:{_OPEN})\\?", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\n\\'\"abfnrtv01234567xNuU")


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
        """True if calls begin at a place in a text; None if that depends on the text to come."""
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
    """Reads calls with literal arguments. Python's own parser reads single strings and numbers
    only: it may exhaust the stack on nested text. Raises Malformed, or Unfinished at the end of the
    text."""

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

    def value(self, depth: int = MAX_ARGUMENT_DEPTH) -> Any:
        if not depth:
            raise Malformed
        if self._take("["):
            return self._items("]", depth)
        if self._take("("):
            return self._parenthesised(depth)
        if self._take("{"):
            return self._entries(depth)
        if text := self._match(_TEXT):
            parts = [_string(text[0])]
            while text := self._match(_TEXT):
                parts.append(_string(text[0]))
            return "".join(parts)
        if number := self._match(_NUMBER):
            try:
                return _number(number[1] + number[2])
            except Malformed:  # 1_ may become 1_000
                raise Unfinished if self.at == len(self._text) else Malformed from None
        name = self._match(_NAME)
        if name is not None and name[0] == "set":  # the only literal of an empty one
            self._need("(")
            self._need(")")
            return []
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

    def _parenthesised(self, depth: int) -> Any:
        """A tuple, or one value in parentheses."""
        start = self.at
        items = self._items(")", depth)
        single = len(items) == 1 and not self._text[start : self.at - 1].rstrip().endswith(",")
        return items[0] if single else items

    def _items(self, closing: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take(closing):
            items.append(self.value(depth - 1))
            if self._ends_items(closing):
                break
        return items

    def _entries(self, depth: int) -> dict[str, Any] | list[Any]:
        """A dictionary, or a set as a list."""
        entries: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value(depth - 1)
            if not entries and not self._take(":"):
                return self._set(key, depth)
            if entries:
                self._need(":")
            if not isinstance(key, str) or key in entries:
                raise Malformed
            entries[key] = self.value(depth - 1)
            if self._ends_items("}"):
                break
        return entries

    def _set(self, first: Any, depth: int) -> list[Any]:
        """A set after its first value."""
        items = [first]
        if not self._ends_items("}"):
            items += self._items("}", depth)
        return list({repr(one): one for one in items}.values())

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
        """The match of a pattern after white space."""
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


def _string(literal: str) -> str:
    """The value of one string literal."""
    if literal[0] in "'\"" and not any(sign in literal for sign in "\\\r\0"):
        quotes = 3 if len(literal) > 5 and literal[1] == literal[2] == literal[0] else 1
        return literal[quotes:-quotes]
    if literal[0] not in "rR":  # Python warns of other escapes, and keeps them
        literal = _ESCAPE.sub(lambda one: one[0] if one[1] in _ESCAPES else "\\" + one[0], literal)
    value = _evaluated(literal)
    if not isinstance(value, str):
        raise Malformed
    return value


def _number(literal: str) -> int | float:
    value = _evaluated(literal)
    if not isinstance(value, int | float):
        raise Malformed
    return value


def _evaluated(literal: str) -> Any:
    """The value of one string or number, as Python reads it."""
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError, MemoryError):
        raise Malformed from None
