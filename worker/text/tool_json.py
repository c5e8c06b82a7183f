"""Tool calls as JSON: between tags (Hermes, Qwen 2.5 and 3), or as the whole answer (Llama 3)."""

from __future__ import annotations

from worker.text.tool_call import (
    Block,
    Functions,
    Malformed,
    Openings,
    Unfinished,
    after_any,
    after_closing,
    after_short_blank,
    call_of,
    object_opens,
    read_json,
)

OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_HERMES, _LLAMA = Openings(OPENING), Openings(PYTHON_TAG)


class Hermes:
    """`<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, anywhere in the answer.

    At the end of the answer the closing tag may be missing.
    """

    closings = (CLOSING,)
    separators = ""
    markers = (OPENING, CLOSING)

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        return _HERMES.find(text, at)

    def read(self, text: str, at: int, *, final: bool) -> Block:
        start = _object_after(text, at + len(OPENING))
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

    def find(self, text: str, at: int, blank: str | None) -> tuple[int, bool]:
        start = at if blank is None else after_any(text, at, blank)
        if blank is not None and text.startswith("{", start):
            opens = object_opens(text, start)
            if opens is not False:
                return start, opens is True
        return _LLAMA.find(text, start)

    def read(self, text: str, at: int, *, final: bool) -> Block:
        start = at + len(PYTHON_TAG) if text.startswith(PYTHON_TAG, at) else at
        value, end = read_json(text, _object_after(text, start))
        return Block((call_of(value, self._functions),), end)


def _object_after(text: str, at: int) -> int:
    """The place of the object that follows `at` after white space. Raises Malformed if it can't be
    that of a call, or Unfinished."""
    start = after_short_blank(text, at)
    opens = None if start is None else text[start] == "{" and object_opens(text, start)
    if start is None or opens is None:
        raise Unfinished
    if not opens:
        raise Malformed
    return start
