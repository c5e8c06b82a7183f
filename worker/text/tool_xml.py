"""Tool calls as tags for the function and each parameter (Qwen3-Coder, Qwen3.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.text.tool_call import (
    Block,
    Call,
    Functions,
    Malformed,
    Openings,
    Unfinished,
    after_closing,
    after_short_blank,
    parse_json,
    to_call,
)
from worker.text.tool_python import parse_literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER, END = "<function=", "<parameter=", "</function>"
_OPENINGS = Openings(OPENING, FUNCTION)
_FUNCTION = re.compile(r"<function=([^<>\n]{1,256})>\s*")
_CUT_FUNCTION = re.compile(r"<function=[^<>\n]{0,256}")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,256})>")
_CUT_PARAMETER = re.compile(r"<parameter=[^<>\n]{0,256}")
# A value ends where the next tag follows, so it may contain the closing tag.
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")
_KINDS: dict[str, Any] = {
    "boolean": bool,
    "integer": int,
    "number": int | float,
    "null": type(None),
    "array": list,
    "object": dict,
}


class QwenXml:
    """`<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n
    </tool_call>`, anywhere in the answer. The outer tags may be missing, since these models often
    omit them. The types of the values are those of the function's JSON schema.
    """

    closings = (END, CLOSING)
    separators = ""
    markers = (OPENING, CLOSING)

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._text = ""  # the text that was read last
        self._failed: dict[int, type[Malformed | Unfinished]] = {}  # by place of a parameter
        self._endless = 0  # no value that begins here or later has an end

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        return _OPENINGS.find(text, at)

    def read(self, text: str, at: int, *, final: bool) -> Block:
        start: int | None = at
        if text.startswith(OPENING, at):
            start = after_short_blank(text, at + len(OPENING))
        if start is None:
            raise Unfinished
        head = _FUNCTION.match(text, start)
        if head is None:
            raise _fault(text, start, (FUNCTION,), _CUT_FUNCTION)
        parameters, end = self._parameters(text, head.end())
        try:
            call = self._call(head[1].strip(), parameters)
        except Malformed:
            raise Malformed(end) from None
        closed = after_closing(text, end, CLOSING, final=final)
        return Block((call,), end if closed is None else closed)

    def _parameters(self, text: str, at: int) -> tuple[list[tuple[str, str]], int]:
        """The names and values of the parameters at a place in a text, and the end of the call.

        A call whose parameters have no end contains the next call, whose parameters are the same
        from some place on, so the places that were visited are remembered.
        """
        if text is not self._text:
            self._text, self._failed, self._endless = text, {}, len(text)
        parameters: list[tuple[str, str]] = []
        visited: list[int] = []
        try:
            while not text.startswith(END, at):
                if at in self._failed:
                    raise self._failed[at]
                visited.append(at)
                name = _PARAMETER.match(text, at)
                if name is None:
                    raise _fault(text, at, (PARAMETER, END), _CUT_PARAMETER)
                start = name.end()
                value_end = _VALUE_END.search(text, start) if start < self._endless else None
                if value_end is None:
                    self._endless = min(start, self._endless)
                    raise Unfinished
                parameters.append((name[1].strip(), text[start : value_end.start()]))
                at = value_end.end()
        except (Malformed, Unfinished) as error:
            self._failed.update(dict.fromkeys(visited, type(error)))
            raise
        return parameters, at + len(END)

    def _call(self, name: str, parameters: list[tuple[str, str]]) -> Call:
        properties = self._functions.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments: dict[str, Any] = {}
        for key, text in parameters:
            if key in arguments:
                raise Malformed
            value = text.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, types_of(schemas.get(key)))
        return to_call(name, arguments)


def _fault(
    text: str, at: int, tags: tuple[str, ...], cut: re.Pattern[str]
) -> Malformed | Unfinished:
    """The error for a place where neither of some tags is: the end of the text may cut one."""
    rest = text[at : at + max(map(len, tags))]
    begun = any(tag.startswith(rest) for tag in tags) or cut.fullmatch(text, at)
    return Unfinished() if begun else Malformed()


def types_of(schema: Any) -> set[str]:
    """The types that a JSON schema allows; empty if it doesn't say."""
    if not isinstance(schema, Mapping):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        types |= {one for one in given if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types |= types_of(option)
    for key, kind in (("properties", "object"), ("$ref", "object"), ("items", "array")):
        if not types and key in schema:
            types.add(kind)
    return types


def typed(text: str, types: set[str]) -> Any:
    """The value of the first type but string that the text has; else the text itself. Values are
    written as in JSON or as in Python."""
    kinds = [_KINDS[one] for one in sorted(types) if one in _KINDS]
    if not kinds:
        return text
    for parse in (parse_json, parse_literal):
        try:
            value = parse(text.strip())
        except Malformed:
            continue
        for kind in kinds:
            if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
                return value
    return text
