"""Tool calls as tags for the function and each parameter (Qwen3-Coder, Qwen3.5)."""

from __future__ import annotations

import re
from typing import Any

from worker.text.argument_types import ArgumentTypes
from worker.text.tool_call import (
    Block,
    Call,
    Functions,
    Malformed,
    Openings,
    Unfinished,
    after_blank,
    after_closing,
    after_short_blank,
    to_call,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
TAGS = (OPENING, CLOSING, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
ENDS = (FUNCTION_END, CLOSING)  # of a call: the first one may be missing
_LONGEST = max(map(len, TAGS))
_OPENINGS = Openings(OPENING, FUNCTION)
_FUNCTION = re.compile(r"<function=([^<>\n]{1,256})>\s*")
_CUT_FUNCTION = re.compile(r"<function=[^<>\n]{0,256}")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>")
_CUT_PARAMETER = re.compile(r"<parameter=[^<>\n]{0,256}")
_VALUE_END = re.compile(  # a tag that may end a value
    r"</?tool_call>|</function>|</parameter>|<(?:function|parameter)=[^<>\n]{1,256}>"
)


class QwenXml:
    """`<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n
    </tool_call>`, anywhere in the answer. The types of the values are those of the function's JSON
    schema.

    These models often omit tags. The outer ones may be missing, and so may `</function>` before
    `</tool_call>`. A value whose `</parameter>` is missing ends where the next parameter begins or
    the call ends. A call without an end stays text, since it may be cut.
    """

    closings = ENDS
    separators = ""
    markers = (OPENING, CLOSING)

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._types: dict[str, ArgumentTypes] = {}

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        return _OPENINGS.find(text, at)

    def read(self, text: str, at: int, *, final: bool) -> Block:
        start: int | None = at
        wrapped = text.startswith(OPENING, at)
        if wrapped:
            start = after_short_blank(text, at + len(OPENING))
        if start is None:
            raise Unfinished
        head = _FUNCTION.match(text, start)
        if head is None:
            raise _fault(text, start, (FUNCTION,), _CUT_FUNCTION)
        try:
            parameters, end = _parameters(text, head.end(), wrapped=wrapped, final=final)
        except Unfinished:
            if not final:
                raise
            raise Malformed(head.end()) from None
        except Malformed as error:
            raise Malformed(error.end or head.end()) from None
        try:
            call = self._call(head[1].strip(), parameters)
        except Malformed:
            raise Malformed(end) from None
        closed = after_closing(text, end, CLOSING, final=final)
        return Block((call,), end if closed is None else closed)

    def _call(self, name: str, parameters: list[tuple[str, str]]) -> Call:
        if name not in self._types:
            self._types[name] = ArgumentTypes(self._functions.get(name, {}))
        arguments: dict[str, Any] = {}
        for key, text in parameters:
            if key in arguments:
                raise Malformed
            value = text.removeprefix("\n").removesuffix("\n")
            arguments[key] = self._types[name].value(key, value)
        return to_call(name, arguments)


def _parameters(
    text: str, at: int, *, wrapped: bool, final: bool
) -> tuple[list[tuple[str, str]], int]:
    """The names and values of the parameters at a place in a text, and the end of the call."""
    parameters: list[tuple[str, str]] = []
    while not text.startswith(ENDS, at):
        name = _PARAMETER.match(text, at)
        if name is None:
            raise _fault(text, at, (PARAMETER, *ENDS), _CUT_PARAMETER)
        end, at = _value_end(text, name.end(), wrapped=wrapped, final=final)
        parameters.append((name[1].strip(), text[name.end() : end]))
    return parameters, at + len(FUNCTION_END) if text.startswith(FUNCTION_END, at) else at


def _value_end(text: str, at: int, *, wrapped: bool, final: bool) -> tuple[int, int]:
    """The end of the value at a place in a text, and the position of the next tag of its call.

    A tag belongs to the value if what follows it shows that the call goes on: a value may be code
    or text about such calls. `wrapped`: nothing but tags follows the end of the call.
    """
    run: int | None = None  # where the closing tags begin that precede `at`
    opening: int | None = None  # the same of <tool_call>
    closed = False  # a tag that ends a value is in it
    while (tag := _VALUE_END.search(text, at)) is not None:
        place, at = tag.span()
        kind = next(one for one in TAGS if tag[0].startswith(one))
        if kind == PARAMETER:
            return _unclosed(place, closed)
        following = _following(text, at, final=final)
        if kind == FUNCTION and following in (PARAMETER, *ENDS):  # another call begins
            raise Malformed(place if opening is None else opening)
        opening = place if kind == OPENING and following == FUNCTION else None
        if kind == CLOSING and following in ("", OPENING, FUNCTION):
            return _unclosed(place, closed)
        if kind not in (PARAMETER_END, FUNCTION_END):
            continue
        run = place if run is None else run
        if kind == PARAMETER_END and following in (PARAMETER, *ENDS):
            return run, after_blank(text, at)
        if following == kind:
            continue
        if kind == PARAMETER_END or following == PARAMETER:
            closed = True
        elif following != PARAMETER_END and not (wrapped and following is None):
            return _unclosed(run, closed)
        run = None
    raise Unfinished


def _unclosed(end: int, closed: bool) -> tuple[int, int]:
    """The end of a value that has no closing tag; what `closed` one may also have been text between
    the parameters."""
    if closed:
        raise Malformed
    return end, end


def _following(text: str, at: int, *, final: bool) -> str | None:
    """The tag that follows a place after white space: "" at the end of the answer, None if it is
    other text. Raises Unfinished if this depends on the text to come."""
    start = after_blank(text, at)
    for tag in TAGS:
        if text.startswith(tag, start):
            return tag
    rest = text[start : start + _LONGEST]
    if not any(tag.startswith(rest) for tag in TAGS):
        return None
    if not final:
        raise Unfinished
    return ""


def _fault(
    text: str, at: int, tags: tuple[str, ...], cut: re.Pattern[str]
) -> Malformed | Unfinished:
    """The error for a place where neither of some tags is: the end of the text may cut one."""
    rest = text[at : at + max(map(len, tags))]
    begun = any(tag.startswith(rest) for tag in tags) or cut.fullmatch(text, at)
    return Unfinished() if begun else Malformed()
