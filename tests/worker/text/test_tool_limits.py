"""The incremental parser of tool calls on hostile text: its work is linear in the length."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.worker.text.tool_texts import CODER, FUNCTIONS, HERMES, LLAMA, PARIS
from worker.text import tool_python, tool_xml
from worker.text.tool_call import Call, Unfinished
from worker.text.tool_parser import MAX_CALL, SYNTAXES, ToolParser
from worker.text.tool_python import MAX_CALLS

UNITS = [
    ("qwen3_coder", "", "<function=f>\n<parameter=a>\n"),
    ("qwen3_coder", "", "<tool_call>\n<function=f>\n<parameter=a>\nx"),
    ("qwen3_coder", "", "<function=f><parameter=a>x</parameter>"),
    ("qwen3_coder", "", "<function=f><parameter=a></parameter>x"),
    ("qwen3_coder", "<function=f>", "<parameter=a>x</parameter>  "),
    ("qwen3_coder", "", "<tool_call> "),
    ("hermes", "", "<tool_call>"),
    ("hermes", "", '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', "["),
    ("llama3_json", "{", " "),
    ("llama3_json", "<|python_tag|>", "\n"),
    ("llama3_json", "", '{"name": "now", "parameters": {}};'),
    ("llama3_json", '{"name": "now", "parameters": {"a": ', '{"a":'),
    ("pythonic", "[", "\n"),
    ("pythonic", "```tool_code\n", "now(a=1)\n"),
    ("pythonic", "```tool_code\n", "now(a=[1])\n"),
    ("pythonic", "", "```tool_code\nnow(a=1)\n"),
    ("pythonic", "[now(a=", '{"a":'),
    ("pythonic", '[now(a="', "x"),
    ("pythonic", "[now(a=1", " "),
    ("pythonic", "", "\n"),
]


def parse(syntax: str, text: str, size: int) -> tuple[str, list[Call]]:
    parser = ToolParser(SYNTAXES[syntax](FUNCTIONS))
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(shown for shown, _ in parts), [call for _, calls in parts for call in calls]


class CountedPattern:
    """A regular expression that adds the characters it examines to a list."""

    def __init__(self, pattern: re.Pattern[str], examined: list[int]) -> None:
        self._pattern, self._examined = pattern, examined

    def _count(self, found: re.Match[str] | None, at: int, rest: int) -> re.Match[str] | None:
        self._examined.append((found.end() - at if found else rest) + 1)
        return found

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._count(self._pattern.search(text, at), at, len(text) - at)

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._count(self._pattern.match(text, at), at, 0)


@pytest.mark.parametrize("size", [4, 10**6])
@pytest.mark.parametrize(("syntax", "head", "unit"), UNITS)
def test_the_work_is_linear_in_the_text(
    syntax: str, head: str, unit: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (head + unit * (20_000 // len(unit)))[:20_000]
    examined: list[int] = []
    kind: Any = type(SYNTAXES[syntax](FUNCTIONS))
    find, read = kind.find, kind.read

    def counted_find(self: Any, *place: Any) -> Any:
        at, found = find(self, *place)
        start = place[1] if len(place) == 3 else 0
        examined.append((at if found else len(place[0])) - start)
        return at, found

    def counted_read(self: Any, *place: Any, final: bool) -> Any:
        start = place[1] if len(place) == 2 else 0
        try:
            block = read(self, *place, final=final)
        except Unfinished:
            if not final:
                examined.append(len(place[0]) - start)
            raise
        examined.append(block.end - start)
        return block

    monkeypatch.setattr(kind, "find", counted_find)
    monkeypatch.setattr(kind, "read", counted_read)
    for module, name in (
        *((tool_xml, name) for name in ("_FUNCTION", "_PARAMETER", "_VALUE_END")),
        *((tool_python, name) for name in ("_BLANK", "_NAME", "_KEY", "_TEXT", "_NUMBER")),
    ):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, CountedPattern(getattr(module, name), examined))
    content, calls = parse(syntax, text, size)
    assert calls or content == text
    assert sum(examined) < 100 * len(text)


def test_parameters_with_names_of_their_own_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[int] = []
    text = "".join(f"<function=f><parameter={i}>x</parameter>" for i in range(2000))
    text += f"<parameter=z>{text}"
    for name in ("_PARAMETER", "_VALUE_END"):
        counted = CountedPattern(getattr(tool_xml, name), examined)
        monkeypatch.setattr(tool_xml, name, counted)
    assert parse("qwen3_coder", text, 10**6) == (text, [])
    assert sum(examined) < 40 * len(text)


def test_the_text_that_is_held_is_copied_a_limited_number_of_times() -> None:
    class Held(ToolParser):
        copied = 0

        def _scan(self, *, final: bool) -> tuple[str, list[Call]]:
            self.copied += self._length
            return super()._scan(final=final)

    parser = Held(SYNTAXES["pythonic"](FUNCTIONS))
    text = '[now(a="' + "x" * 20_000
    for character in text:
        parser.push(character)
    parser.flush()
    assert parser.copied < 10 * len(text)


@pytest.mark.parametrize("size", [997, 10**6])
@pytest.mark.parametrize(
    ("syntax", "call"), [("hermes", HERMES), ("llama3_json", LLAMA), ("qwen3_coder", CODER)]
)
def test_a_call_that_is_too_long_stays_text_and_the_next_one_is_read(
    syntax: str, call: str, size: int
) -> None:
    long = call.replace("Paris", "x" * (MAX_CALL - len(call) + 5))
    assert len(parse(syntax, long, size)[1]) == 1
    longer = call.replace("Paris", "x" * MAX_CALL)
    assert parse(syntax, longer, size) == (longer, [])
    if syntax != "llama3_json":  # a call that is the whole answer
        assert parse(syntax, longer + call, size) == (longer, [PARIS])


@pytest.mark.parametrize("size", [1, 7, 10**6])
def test_nested_prints_stay_text(size: int) -> None:
    for text in (
        "[" + "print(" * 2000,
        "```tool_code\n" + "print(" * 2000,
        "[" + "print(" * 400 + "now()" + ")" * 400 + "]",
    ):
        assert parse("pythonic", text, size) == (text, [])
    assert parse("pythonic", "[print(print(now()))]", size) == ("", [Call("now", "{}")])


def test_deeply_nested_arguments_stay_text() -> None:
    for depth, count in ((60, 1), (70, 0)):
        value = "[" * depth + "]" * depth
        text = HERMES.replace('"Paris"', value)
        assert len(parse("hermes", text, 4)[1]) == count


def test_a_complete_call_with_invalid_values_stays_text_as_a_whole() -> None:
    twice = CODER.replace("</function>", "<parameter=city>\nRome\n</parameter>\n</function>")
    assert parse("qwen3_coder", f"{twice}\n{CODER}", 5) == (twice, [PARIS])


@pytest.mark.parametrize("size", [5, 10**6])
def test_a_list_of_too_many_calls_stays_text(size: int) -> None:
    for opening, call, closing in (
        ("[", "now(), ", "]"),
        ("```tool_code\n", "now()\n", "```"),
        ("[", '{"name": "now", "parameters": {}}, ', "]"),
    ):
        for count, found in ((MAX_CALLS, MAX_CALLS), (MAX_CALLS + 1, 0)):
            text = opening + (call * count).removesuffix(", ") + closing
            content, calls = parse("pythonic", text, size)
            assert (len(calls), content) == (found, "" if found else text)
