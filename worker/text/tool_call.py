"""A tool call in the text of an answer, and what all syntaxes of such calls share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from worker.text.stop_strings import overlap

# The functions that a request defines: name → JSON schema of the parameters.
Functions = Mapping[str, Mapping[str, Any]]

WHITESPACE = " \t\r\n"
LONGEST_TOKEN = 6  # of JSON, cut by the end of the text: \u12ab
MAX_BLANK = 64  # characters of white space between the opening of a call and its first word
MAX_ARGUMENT_DEPTH = 64  # levels of nested lists and objects in the arguments of a call
_CALL_KEYS = frozenset(("name", "type", "id", "parameters", "arguments"))
_LONGEST_KEY = max(map(len, _CALL_KEYS))
_BLANK = re.compile(r"[ \t\r\n]*")


class Malformed(Exception):
    """The text is not a tool call, whatever follows. `end`: up to here, no call begins in it; None
    if one may begin after the first character."""

    def __init__(self, end: int | None = None) -> None:
        super().__init__(end)
        self.end = end


class Unfinished(Exception):
    """The text may become a tool call when more of it has come."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function. `arguments`: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """Calls that were read from a text, and their end."""

    calls: tuple[Call, ...]
    end: int


class Syntax(Protocol):
    """The syntax in which a model family writes tool calls. The calls that are read must not depend
    on the text after them, so that it doesn't matter how much of the answer has come."""

    @property
    def closings(self) -> tuple[str, ...]:
        """A call can be whole only when the last characters contain one of these."""

    @property
    def separators(self) -> str:
        """Characters that are blank after a call, as white space is."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of special tokens that the syntax needs to see."""

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        """The position at or after a place in a text where a call may begin, and whether it does:
        False if this depends on the text to come. The length of the text if no call begins in it.
        `blank`: characters that may precede a call at the start of the answer; None if content came
        before."""

    def read(self, text: str, at: int, *, final: bool) -> Block:
        """The calls at a place that `find` found; `final`: no text follows. Raises Malformed or
        Unfinished. Takes time linear in the length of the text, also in sum over all places of the
        same text."""


def to_call(name: Any, arguments: Any) -> Call:
    """A call from its parts. Raises Malformed. Arguments may be JSON text, as in OpenAI's API."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Malformed
    if _deeper_than(MAX_ARGUMENT_DEPTH, arguments):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinity, a lone surrogate, too deep
        raise Malformed from None
    return Call(name, text)


def _deeper_than(depth: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_deeper_than(depth - 1, one) for one in inner)


def call_of(value: Any, functions: Functions | None = None) -> Call:
    """The call that a JSON object describes. Raises Malformed.

    `functions`: nothing but the object shows that it is a call, so it must name one of them and
    have arguments.
    """
    if not isinstance(value, dict) or not value.keys() <= _CALL_KEYS:
        raise Malformed
    if value.get("type", "function") != "function":
        raise Malformed
    name = value.get("name")
    given = [value[key] for key in ("parameters", "arguments") if value.get(key) is not None]
    if len(given) > 1:
        raise Malformed
    if functions is not None and not (given and isinstance(name, str) and name in functions):
        raise Malformed
    return to_call(name, given[0] if given else {})


def _no_constant(_: str) -> NoReturn:
    raise ValueError


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):  # one of two values would be lost
        raise Malformed
    return values


# NaN and infinity are not JSON.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)


def parse_json(text: str) -> Any:
    """Raises Malformed."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def read_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON object or list at a place in a text, and its end. Raises Malformed or Unfinished."""
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        cut = error.pos >= len(text) - LONGEST_TOKEN or error.msg.startswith("Unterminated string")
        raise (Unfinished if cut else Malformed) from None
    except (ValueError, RecursionError):
        raise Malformed from None


def after_blank(text: str, at: int) -> int:
    """The place of the first character that is not white space."""
    blank = _BLANK.match(text, at)
    assert blank is not None
    return blank.end()


def after_any(text: str, at: int, blank: str) -> int:
    """The place of the first character that is not one of `blank`."""
    while at < len(text) and text[at] in blank:
        at += 1
    return at


def after_short_blank(text: str, at: int) -> int | None:
    """The place of the first character that is not white space; None if the text ends before it.
    Raises Malformed if there is more than MAX_BLANK of white space."""
    end = after_blank(text, at)
    if end - at > MAX_BLANK:
        raise Malformed
    return end if end < len(text) else None


def object_opens(text: str, at: int) -> bool | None:
    """True if the object at a place in a text, where `{` is, begins as the JSON object of a call
    does, by its first key. None if that depends on the text to come."""
    try:
        start = after_short_blank(text, at + 1)
    except Malformed:
        return False
    if start is None:
        return None
    if text[start] != '"':
        return False
    key, quote, _ = text[start + 1 : start + _LONGEST_KEY + 2].partition('"')
    if quote:
        return key in _CALL_KEYS
    return None if any(known.startswith(key) for known in _CALL_KEYS) else False


class Openings:
    """Texts that begin a call, anywhere in the answer."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))
        self._longest = max(map(len, texts))

    def find(self, text: str, at: int) -> tuple[int, bool]:
        """As `Syntax.find`. One pattern for all texts, so that the search ends at the first."""
        found = self._pattern.search(text, at)
        if found is not None:
            return found.start(), True
        end = text[max(at, len(text) - self._longest) :]
        return len(text) - max(overlap(end, one) for one in self.texts), False


def after_closing(text: str, end: int, closing: str, *, final: bool) -> int | None:
    """The end of the closing tag that follows `end` after white space; None if another text
    follows. At the end of the answer, the tag may be missing. Raises Unfinished."""
    start = after_blank(text, end)
    if text.startswith(closing, start):
        return start + len(closing)
    if not closing.startswith(text[start : start + len(closing)]):
        return None
    if not final:
        raise Unfinished
    return len(text)
