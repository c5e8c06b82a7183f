"""An error within a syntax of tool calls loses no text of the answer."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.worker.text.tool_texts import FUNCTIONS, HERMES, PARIS
from worker.text.tool_json import Hermes
from worker.text.tool_parser import SYNTAXES, ToolParser

TEXT = f"Well: {HERMES} and\n {HERMES} \n"


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("method", ["find", "read"])
@pytest.mark.parametrize("error", [RecursionError("too deep"), KeyError("x"), AssertionError()])
def test_the_answer_stays_text_when_its_reader_fails(
    method: str,
    error: Exception,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Hermes, method, fails)
    parser = ToolParser(SYNTAXES["hermes"](FUNCTIONS))
    with caplog.at_level(logging.ERROR):
        pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
        parts = [*(parser.push(piece) for piece in pieces), parser.flush()]
    assert "".join(text for text, _ in parts) == TEXT
    assert not any(calls for _, calls in parts)
    assert [record.message for record in caplog.records] == [
        "tool calls could not be read: the rest of this answer stays text"
    ]


def test_calls_before_the_error_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Hermes.read
    texts: list[str] = []

    def fails_later(self: Hermes, text: str, at: int, *, final: bool) -> Any:
        texts.append(text)
        if len(texts) > 1:
            raise RuntimeError
        return read(self, text, at, final=final)

    monkeypatch.setattr(Hermes, "read", fails_later)
    parser = ToolParser(SYNTAXES["hermes"](FUNCTIONS))
    text, calls = parser.push(f"{HERMES}\n{HERMES}")
    assert (text + parser.flush()[0], calls) == (HERMES, [PARIS])
