"""A tool call in the text of an answer, and what all syntaxes of such calls share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from worker.text.stop_strings import overlap

# The functions that a request defines: name → JSON schema of the parameters.
Functions = Mapping[str, Mapping[str, Any]]

WHITESPACE = " \t\r\n"
LONGEST_TOKEN = 6  # of JSON, cut by the end of the text: \u12ab
_CALL_KEYS = frozenset(("name", "type", "id", "parameters", "arguments"))


class Malformed(Exception):
    """The text is not a tool call, whatever follows."""


class Unfinished(Exception):
    """The text may become a tool call when more of it has come."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function. `arguments`: JSON text of an object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Block:
    """Calls that were read from the beginning of a text; `end`: length of the text they take."""

    calls: tuple[Call, ...]
    end: int


class Syntax(Protocol):
    """How a model family writes tool calls. What is read must not depend on text after the end of
    the calls, so that it doesn't matter how much of the answer has come."""

    @property
    def closings(self) -> tuple[str, ...]:
        """A call can be whole only when the last characters contain one of these."""

    @property
    def separators(self) -> str:
        """Characters that are blank after a call, as white space is."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of special tokens that the syntax needs to see."""

    def find(self, text: str, blank: str | None) -> tuple[int, bool]:
        """Where a call may begin, and whether it does: False if this depends on the text to come.
        The length of the text if no call begins in it. `blank`: characters that may precede a call
        at the start of the answer; None if content came before."""

    def read(self, text: str, *, final: bool) -> Block:
        """The calls at the beginning of a text that `find` found; `final`: no text follows. Raises
        Malformed or Unfinished."""


def to_call(name: Any, arguments: Any) -> Call:
    """A call from its parts. Raises Malformed. Arguments may be JSON text, as in OpenAI's API."""
    if isinstance(arguments, str):
        arguments = parse_json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise Malformed
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):  # infinity, a lone surrogate, too deep
        raise Malformed from None
    return Call(name, text)


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


_DECODER = json.JSONDecoder(parse_constant=_no_constant)  # NaN and infinity are not JSON


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


def object_opens(text: str) -> bool | None:
    """Whether a text that begins with `{` begins as the JSON object of a call does, by its first
    key. None: this depends on the text to come."""
    rest = text[1:].lstrip(WHITESPACE)
    if not rest:
        return None
    key, quote, _ = rest[1:].partition('"')
    if not rest.startswith('"'):
        return False
    if quote:
        return key in _CALL_KEYS
    return None if any(known.startswith(key) for known in _CALL_KEYS) else False


def find_marker(text: str, markers: tuple[str, ...]) -> tuple[int, bool]:
    """`Syntax.find` for calls that begin with one of the markers, anywhere."""
    whole = min((at for marker in markers if (at := text.find(marker)) >= 0), default=len(text))
    part = len(text) - max(overlap(text, marker) for marker in markers)
    return (part, False) if part < whole else (whole, whole < len(text))


def after_closing(text: str, end: int, closing: str, *, final: bool) -> int | None:
    """The end of the closing tag that follows `end` after white space; None if another text
    follows. At the end of the answer, the tag may be missing. Raises Unfinished."""
    rest = text[end:].lstrip(WHITESPACE)
    if rest.startswith(closing):
        return len(text) - len(rest) + len(closing)
    if not closing.startswith(rest):
        return None
    if not final:
        raise Unfinished
    return len(text)
