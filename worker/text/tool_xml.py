"""Tool calls as tags for the function and each parameter (Qwen3-Coder, Qwen3.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from worker.text.tool_call import (
    WHITESPACE,
    Block,
    Functions,
    Malformed,
    Unfinished,
    after_closing,
    find_marker,
    parse_json,
    to_call,
)
from worker.text.tool_python import parse_literal

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER, END = "<function=", "<parameter=", "</function>"
_FUNCTION = re.compile(r"<function=([^<>\n]+)>\s*")
_CUT_FUNCTION = re.compile(r"<function=[^<>\n]*")
# A value ends where the next tag follows, so it may contain the closing tag.
_PARAMETER = re.compile(
    r"<parameter=([^<>\n]+)>(.*?)</parameter>\s*(?=<parameter=|</function>)", re.DOTALL
)
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

    def find(self, text: str, blank: str | None) -> tuple[int, bool]:
        return find_marker(text, (OPENING, FUNCTION))

    def read(self, text: str, *, final: bool) -> Block:
        body = text.removeprefix(OPENING).lstrip(WHITESPACE)
        start = len(text) - len(body)
        head = _FUNCTION.match(body)
        if head is None:
            opens = FUNCTION.startswith(body) or _CUT_FUNCTION.fullmatch(body)
            raise Unfinished if opens else Malformed
        name = head[1].strip()
        arguments, at = self._arguments(name, body, head.end())
        if not body.startswith(END, at):
            rest = body[at:]
            cut = rest.startswith(PARAMETER) or PARAMETER.startswith(rest) or END.startswith(rest)
            raise Unfinished if cut else Malformed
        call, end = to_call(name, arguments), start + at + len(END)
        closed = after_closing(text, end, CLOSING, final=final)
        return Block((call,), end if closed is None else closed)

    def _arguments(self, name: str, body: str, at: int) -> tuple[dict[str, Any], int]:
        """The whole parameters at a place in a text, and their end."""
        properties = self._functions.get(name, {}).get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        arguments: dict[str, Any] = {}
        while parameter := _PARAMETER.match(body, at):
            key = parameter[1].strip()
            if key in arguments:
                raise Malformed
            value = parameter[2].removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, types_of(schemas.get(key)))
            at = parameter.end()
        return arguments, at


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
