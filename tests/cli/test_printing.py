"""Streamed answers are printed once, also across restarts; reasoning is kept off stdout."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs import ChatChunk
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice
from jobs.cli.printing import print_job, print_other_choices, print_stream
from jobs.cli.waiting import WaitNotice
from jobs.testing import Answer, FakeWorker


def chunk(content: str | None = None, reasoning: str | None = None, *, index: int = 0) -> ChatChunk:
    return ChatChunk.model_validate(
        {
            "id": "chatcmpl-1",
            "created": 1,
            "model": "demo",
            "choices": [
                {"index": index, "delta": {"content": content, "reasoning_content": reasoning}}
            ],
        }
    )


def test_content_goes_to_stdout_and_reasoning_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    print_stream([chunk(reasoning="17+25"), chunk("4"), chunk("2")])
    out, err = capsys.readouterr()
    assert out == "42\n"
    assert "17+25" in err


def test_quiet_prints_only_the_content(capsys: pytest.CaptureFixture[str]) -> None:
    print_stream([chunk(reasoning="17+25"), chunk("4"), chunk("2")], quiet=True)
    assert capsys.readouterr() == ("42\n", "")


def test_each_delta_is_printed_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def chunks() -> Iterator[ChatChunk]:
        for text in ("a", "b"):
            yield chunk(text)
            seen.append(capsys.readouterr().out)

    print_stream(chunks())
    assert seen == ["a", "b"]


def test_an_answer_that_starts_again_is_printed_on_a_new_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    restart = ChatChunk(id="c", created=1, model="demo", choices=[], reset=True)
    chunks = [chunk("ab"), restart, chunk(reasoning="so"), chunk("x"), chunk("y")]
    print_stream(chunks)
    out, err = capsys.readouterr()
    assert out == "abxy\n"
    assert err == (
        "\nthe job has started again, and its answer differs: it is printed from its start\nso\n\n"
    )
    print_stream(chunks, quiet=True)
    assert tuple(capsys.readouterr()) == ("ab\nxy\n", "")


def test_only_the_first_choice_is_streamed(capsys: pytest.CaptureFixture[str]) -> None:
    print_stream([chunk("a"), chunk("z", index=1), chunk("b")])
    assert capsys.readouterr().out == "ab\n"


CALLS = [
    {"id": "1", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}},
    {"id": "2", "function": {"name": "now", "arguments": "{}"}},
]
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "now")]


def test_tool_calls_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer of calls alone, and one with text before its calls; two choices each."""
    answers = [[Answer("", tool_calls=CALLS)] * 2, [Answer("I add.", tool_calls=CALLS)] * 2]
    calls = 'add({"a": 17, "b": 25})\nnow({})\n'
    with FakeWorker(answers) as worker, worker.client() as client:
        for text in ("", "I add.\n"):
            job = client.submit(
                {
                    "model": "demo",
                    "messages": [{"role": "user", "content": "hi"}],
                    "tools": TOOLS,
                    "n": 2,
                }
            )
            notice = WaitNotice(client.connection, quiet=True)
            print_job(job, notice, as_json=False, quiet=False)
            assert capsys.readouterr().out == (
                f"choice 1 of 2:\n{text}{calls}\nchoice 2 of 2:\n{text}{calls}"
            )


def test_each_further_choice_has_a_line_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    choices = [
        Choice(index=index, message=AssistantMessage(content=text), finish_reason="stop")
        for index, text in enumerate("ab")
    ]
    completion = ChatCompletion(id="c", created=1, model="m", choices=choices)
    print_other_choices(completion)
    assert tuple(capsys.readouterr()) == ("\nchoice 2 of 2:\nb\n", "")
