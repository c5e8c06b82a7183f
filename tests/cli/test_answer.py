"""A streamed answer is shown once, content apart from reasoning, whatever happens to its worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs import ChatChunk
from jobs.cli.answer import show


def chunk(
    content: str | None = None, reasoning: str | None = None, *, index: int = 0, reset: bool = False
) -> ChatChunk:
    return ChatChunk.model_validate(
        {
            "id": "chatcmpl-1",
            "created": 1,
            "model": "demo",
            "choices": [
                {"index": index, "delta": {"content": content, "reasoning_content": reasoning}}
            ],
            "reset": reset or None,
        }
    )


def test_content_goes_to_stdout_and_reasoning_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    show([chunk(reasoning="17+25"), chunk("4"), chunk("2")])
    out, err = capsys.readouterr()
    assert out == "42\n"
    assert "17+25" in err


def test_reasoning_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    show([chunk(reasoning="17+25"), chunk("42")], reasoning=False)
    assert capsys.readouterr() == ("42\n", "")


def test_each_piece_is_shown_when_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def chunks() -> Iterator[ChatChunk]:
        for text in ("a", "b"):
            yield chunk(text)
            seen.append(capsys.readouterr().out)

    show(chunks())
    assert seen == ["a", "b"]


def test_an_attempt_that_says_the_same_again_is_shown_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([chunk("ab"), chunk("c"), chunk("a", reset=True), chunk("bcd"), chunk("e")])
    assert capsys.readouterr().out == "abcde\n"


def test_an_attempt_that_says_something_else_begins_a_new_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([chunk("ab"), chunk("x", reset=True), chunk("y")])
    out, err = capsys.readouterr()
    assert out == "ab\nxy\n"
    assert "starts again" in err


def test_other_choices_do_not_mix_into_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    show([chunk("a"), chunk("z", index=1), chunk("b")])
    assert capsys.readouterr().out == "ab\n"
