"""The incremental parser of tool calls: what it finds, and when."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.worker.text.tool_texts import (
    CODER,
    CODER_NOW,
    FUNCTIONS,
    HERMES,
    HERMES_NOW,
    LLAMA,
    MALFORMED,
    NOW,
    PARIS,
    WELL_FORMED,
)
from worker.option_values import TOOL_PARSERS
from worker.text.tool_call import Call
from worker.text.tool_parser import SYNTAXES, ToolParser

Answer = tuple[str, list[Call]]


def parse(syntax: str, *pieces: str) -> Answer:
    parser = ToolParser(SYNTAXES[syntax](FUNCTIONS))
    parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return "".join(text for text, _ in parts), [call for _, calls in parts for call in calls]


def by_position(cases: list[Any]) -> list[str]:
    return [f"{case[0]}-{number}" for number, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("syntax", "text", "content", "calls"), WELL_FORMED, ids=by_position(WELL_FORMED)
)
def test_calls_are_read(syntax: str, text: str, content: str, calls: list[Call]) -> None:
    assert parse(syntax, text) == (content, calls)
    assert parse(syntax, *text) == (content, calls)


@pytest.mark.parametrize(("syntax", "text"), MALFORMED, ids=by_position(MALFORMED))
def test_malformed_calls_stay_text(syntax: str, text: str) -> None:
    assert parse(syntax, text) == (text, [])
    pieces = text if len(text) < 1000 else [text[at : at + 997] for at in range(0, len(text), 997)]
    assert parse(syntax, *pieces) == (text, [])


@pytest.mark.parametrize(
    ("syntax", "bad", "good"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arg', HERMES),
        ("hermes", HERMES.replace("}}", "}"), HERMES),
        ("qwen3_coder", CODER[:50], CODER),
        ("qwen3_coder", "<tool_call>", CODER),
        ("pythonic", "```json\n{}\n```", f"```json\n{LLAMA}\n```"),
    ],
)
def test_a_malformed_call_does_not_hide_the_next_one(syntax: str, bad: str, good: str) -> None:
    assert parse(syntax, bad + good) == (bad, [PARIS])
    assert parse(syntax, *(bad + good)) == (bad, [PARIS])


PARTS: dict[str, list[str]] = {
    "hermes": [HERMES, HERMES_NOW, "<tool_call>", "</tool_call>", '{"name": "now"}', "{", '"', "}"],
    "llama3_json": [LLAMA, "<|python_tag|>", '{"name": "now", "parameters": ', "{}", "}", ";", '"'],
    "qwen3_coder": [
        CODER,
        *("<tool_call>", "<function=now>", "<parameter=city>", "</parameter>", "</function>"),
        *("</tool_call>", "x"),
    ],
    "pythonic": [
        *("[get_weather(city='Paris')]", "```tool_code\n", "```json\n", "```", LLAMA, "now()"),
        *("[", "]", "print(", ")", "'", '"', "\\", "a=1"),
    ],
}
ANY_TEXT = st.sampled_from(sorted(SYNTAXES)).flatmap(
    lambda syntax: st.tuples(
        st.just(syntax),
        st.lists(
            st.one_of(
                st.sampled_from([*PARTS[syntax], " ", "\n", "ok"]),
                st.sampled_from(PARTS[syntax]).flatmap(
                    lambda part: st.integers(0, len(part)).map(lambda end: part[:end])
                ),
                st.text(max_size=3),
            ),
            max_size=8,
        ).map("".join),
    )
)


@given(case=ANY_TEXT, data=st.data())
@example(case=("llama3_json", ';{"name": "now", "parameters": {}}'), data=None)
@example(case=("pythonic", "[get_weather(city = 'Paris' , days= 12 )]"), data=None)
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    case: tuple[str, str], data: st.DataObject | None
) -> None:
    syntax, text = case
    whole = parse(syntax, text)
    assert parse(syntax, *text) == whole
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        edges = [0, *cuts, len(text)]
        pieces = [text[start:end] for start, end in pairwise(edges)]
        assert parse(syntax, *pieces) == whole


@given(case=ANY_TEXT)
def test_without_a_call_the_text_is_untouched(case: tuple[str, str]) -> None:
    syntax, text = case
    content, calls = parse(syntax, text)
    if not calls:
        assert content == text
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
def test_text_is_shown_as_soon_as_it_is_certain(syntax: str) -> None:
    parser = ToolParser(SYNTAXES[syntax](FUNCTIONS))
    assert parser.push("The answer")[0] == "The answer"
    assert parser.push(" is 42.\n")[0] == " is 42."
    assert parser.push("{ x [ <b> ")[0] == "\n{ x [ <b>"


def test_what_cannot_become_a_call_is_shown_at_once() -> None:
    for syntax, text in (
        ("hermes", "<tool_call> tags hold"),
        ("llama3_json", '{"answer": '),
        ("qwen3_coder", "<tool_call>\n{"),
        ("pythonic", "```json\n{1"),
        ("pythonic", "[1, "),
    ):
        parser = ToolParser(SYNTAXES[syntax](FUNCTIONS))
        assert parser.push(text)[0] == text.rstrip()


def test_a_call_is_returned_when_it_is_complete() -> None:
    parser = ToolParser(SYNTAXES["hermes"](FUNCTIONS))
    assert parser.push(HERMES[:-1]) == ("", [])
    assert parser.push(HERMES[-1:]) == ("", [PARIS])
    assert parser.push("\n" + HERMES_NOW) == ("", [NOW])


@pytest.mark.parametrize(
    ("syntax", "head", "unit", "tail"),
    [
        ("hermes", HERMES[:-20], "}", HERMES[-20:]),
        ("llama3_json", LLAMA[:-3], "}{", LLAMA[-3:]),
        ("qwen3_coder", CODER.partition("Paris")[0], "</function>", CODER.partition("Paris")[2]),
        ("pythonic", "[get_weather(places=[", "'a]',", "])]"),
    ],
    ids=lambda value: value if value in SYNTAXES else "",
)
def test_a_long_call_is_read_a_limited_number_of_times(
    syntax: str, head: str, unit: str, tail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(SYNTAXES[syntax](FUNCTIONS))
    read, lengths = kind.read, []

    def counted(self: Any, text: str, at: int, *, final: bool) -> Any:
        lengths.append(len(text) - at)
        return read(self, text, at, final=final)

    monkeypatch.setattr(kind, "read", counted)
    units = 3000
    _, calls = parse(syntax, *head, *([unit] * units), *tail)
    assert [call.name for call in calls] == ["get_weather"]
    assert len([length for length in lengths if length > 256]) < 150


def test_the_command_line_offers_every_syntax() -> None:
    assert sorted(SYNTAXES) == sorted(TOOL_PARSERS)


@pytest.mark.parametrize("head", [CODER.partition("\n</para")[0], CODER[:52]])
def test_a_call_does_not_take_the_arguments_of_the_next_one(head: str) -> None:
    """It has no end, and stays text."""
    for separator in ("", "\n", "</parameter>\n"):
        for following in (CODER, CODER_NOW, CODER.removeprefix("<tool_call>\n")):
            call = NOW if following == CODER_NOW else PARIS
            text = head + separator + following
            bad = text.removesuffix(following).rstrip("\n")
            assert parse("qwen3_coder", text) == (bad, [call])
            assert parse("qwen3_coder", *text) == (bad, [call])
