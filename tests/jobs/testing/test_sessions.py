"""FakeWorker runs the turns of sessions as a real worker does."""

from __future__ import annotations

import pytest

from jobs import ChatRequest, JobError, SessionBusy
from jobs.testing import FakeWorker


def echo(request: ChatRequest) -> str:
    return " ".join(message.text for message in request.messages)


def test_an_answer_may_depend_on_the_whole_conversation() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any", system="s")
        assert session.send("a", timeout=5).text == "s a"
        assert session.send("b", timeout=5).text == "s a s a b"
        assert [message["content"] for message in session.history()] == [
            *("s", "a", "s a", "b", "s a s a b")
        ]
        assert session.edit("c", timeout=5).text == "s a s a c"
        assert len(session.turns()) == 2


def test_turns_wait_for_each_other() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any")
        first = session.submit("a")
        with pytest.raises(SessionBusy, match=first.id):
            session.submit("b")
        second = session.submit("b", wait=True)
        assert second.result(timeout=5).text == "a a b"
        assert first.status() == "finished"


def test_a_cancelled_turn_is_left_out() -> None:
    with FakeWorker(echo) as worker:
        session = worker.client().session(model="any")
        session.submit("a").cancel()
        assert session.send("b", timeout=5).text == "b"
        session.delete()
        with pytest.raises(JobError, match="no session"):
            session.send("c")
