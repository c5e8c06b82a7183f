"""Tool calls as JSON: between tags (Hermes, Qwen 2.5 and 3), or as the whole answer (Llama 3)."""

from __future__ import annotations

from worker.text.tool_call import (
    WHITESPACE,
    Block,
    Functions,
    Malformed,
    Unfinished,
    after_closing,
    call_of,
    find_marker,
    object_opens,
    read_json,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class Hermes:
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, anywhere in the answer.

    At the end of the answer the closing tag may be missing.
    """

    closings = (CLOSING,)
    separators = ""
    markers = (OPENING, CLOSING)

    def find(self, text: str, blank: str | None) -> tuple[int, bool]:
        return find_marker(text, (OPENING,))

    def read(self, text: str, *, final: bool) -> Block:
        start = _object_after(text, len(OPENING))
        value, end = read_json(text, start)
        closed = after_closing(text, end, CLOSING, final=final)
        if closed is None:
            raise Malformed
        return Block((call_of(value),), closed)


class LlamaJson:
    """`{"name": …, "parameters": {…}}` as the whole answer, or after `<|python_tag|>`. Several are
    separated by semicolons."""

    closings = ("}",)
    separators = ";"
    markers = (PYTHON_TAG,)

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def find(self, text: str, blank: str | None) -> tuple[int, bool]:
        if blank is not None:
            bare = text.lstrip(blank)
            opens = object_opens(bare) if bare.startswith("{") else False
            if opens is not False:
                return len(text) - len(bare), opens is True
        return find_marker(text, (PYTHON_TAG,))

    def read(self, text: str, *, final: bool) -> Block:
        start = _object_after(text, len(text) - len(text.removeprefix(PYTHON_TAG)))
        value, end = read_json(text, start)
        return Block((call_of(value, self._functions),), end)


def _object_after(text: str, start: int) -> int:
    """The place of the object that follows `start` after white space. Raises Malformed if it can't
    be that of a call, or Unfinished."""
    body = text[start:].lstrip(WHITESPACE)
    opens = (object_opens(body) if body.startswith("{") else False) if body else None
    if opens is None:
        raise Unfinished
    if not opens:
        raise Malformed
    return len(text) - len(body)
