"""FakeWorker runs the turns of sessions as a real worker does."""

from __future__ import annotations

import pytest

from jobs import ChatRequest, JobError, SessionBusy
from jobs.testing import Answer, FakeWorker
from tests.waiting import PATIENCE


def echo(request: ChatRequest) -> str:
    return " ".join(message.text for message in request.messages)


def test_an_answer_may_depend_on_the_whole_conversation() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any", system="s")
        assert session.send("a", timeout=PATIENCE).text == "s a"
        assert session.send("b", timeout=PATIENCE).text == "s a s a b"
        assert [message["content"] for message in session.history()] == [
            *("s", "a", "s a", "b", "s a s a b")
        ]
        assert session.edit("c", timeout=PATIENCE).text == "s a s a c"
        assert len(session.turns()) == 2


def test_turns_wait_for_each_other() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any")
        first = session.submit("a")
        with pytest.raises(SessionBusy, match=first.id):
            session.submit("b")
        second = session.submit("b", wait=True)
        assert second.result(timeout=PATIENCE).text == "a a b"
        assert first.status() == "finished"


def test_a_cancelled_turn_is_left_out() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any")
        session.submit("a").cancel()
        assert session.send("b", timeout=PATIENCE).text == "b"
        session.delete()
        with pytest.raises(JobError, match="no session"):
            session.send("c")


def test_reasoning_and_calls_are_kept_for_the_template() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answers: list[Answer | str] = [Answer(reasoning="hm", tool_calls=[call]), "3"]
    with FakeWorker(answers) as worker:
        session = worker.client().session(model="any")
        assert session.send("a", timeout=PATIENCE).choices[0].finish_reason == "tool_calls"
        session.send({"role": "tool", "tool_call_id": "c1", "content": "3"}, timeout=PATIENCE)
        asked = worker.requests[1].messages[1]
        assert asked.reasoning_content == "hm" and asked.tool_calls is not None
        assert session.history()[1]["reasoning_content"] == "hm"
        assert [turn.finish_reason for turn in session.turns()] == ["tool_calls", "stop"]
