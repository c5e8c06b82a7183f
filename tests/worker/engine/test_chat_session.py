"""ChatSession: a conversation in the same process, with a real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import ChatRequest, JobError
from jobs.api.conversation import Turn
from worker import ChatSession, Engine

FIELDS: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_each_turn_is_run_with_the_whole_history(engine: Engine) -> None:
    session = ChatSession(engine, system="abc", **FIELDS)
    first = session.respond("a b")
    second = session.respond("c", max_tokens=4)
    assert second.usage is not None and second.usage.completion_tokens == 4
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "c"},
    ]
    assert session.history == [*messages, {"role": "assistant", "content": second.text}]
    alone = engine.chat(ChatRequest(model="m", messages=messages, **{**FIELDS, "max_tokens": 4}))
    assert alone.text == second.text


def test_a_stream_is_the_response(engine: Engine) -> None:
    streamed, whole = ChatSession(engine, **FIELDS), ChatSession(engine, **FIELDS)
    text = "".join(chunk.text for chunk in streamed.stream("a"))
    assert text == whole.respond("a").text
    assert streamed.history == whole.history
    assert [turn.finish_reason for turn in streamed.turns] == ["length"]


def test_a_turn_follows_those_that_ended_before_it_began(engine: Engine) -> None:
    session, other = ChatSession(engine, **FIELDS), ChatSession(engine, **FIELDS)
    first, second = session.stream("a"), session.stream("b")
    texts = ["".join(chunk.text for chunk in one) for one in (first, second)]
    assert texts == [other.respond(content).text for content in ("a", "b")]


def test_turns_are_not_removed_while_one_runs(engine: Engine) -> None:
    session = ChatSession(engine, **FIELDS)
    session.respond("a")
    stream = session.stream("b")
    next(stream)
    for change in (session.undo, session.reset):
        with pytest.raises(JobError, match="wait for its end"):
            change()
    assert len([*stream]) and len(session.turns) == 2
    session.undo()
    assert len(session.turns) == 1


def test_a_dropped_iterator_keeps_what_it_gave(engine: Engine) -> None:
    session = ChatSession(engine, **{**FIELDS, "max_tokens": 50})
    stream = session.stream("a")
    seen = "".join(next(stream).text for _ in range(5))
    with pytest.raises(JobError) as caught:
        session.respond("b")
    assert caught.value.code == "session_busy"
    del stream
    (turn,) = session.turns
    assert turn.finish_reason == "cancelled"
    assert turn.answer["content"].startswith(seen)
    whole = ChatSession(engine, **{**FIELDS, "max_tokens": 50}).respond("a").text
    assert whole.startswith(turn.answer["content"]) and whole != turn.answer["content"]
    session.respond("b")
    assert len(session.history) == 4


def test_a_failed_turn_leaves_the_conversation_as_it_was(engine: Engine) -> None:
    session = ChatSession(engine, **FIELDS)
    session.respond("a")
    before = session.history
    with pytest.raises(JobError) as caught:
        session.respond("b " * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert session.history == before
    with pytest.raises(JobError, match="a session sets it itself"):
        session.respond("a", model="other")
    with pytest.raises(JobError, match="unknown field"):
        ChatSession(engine, temprature=1)
    session.respond("b")


def test_the_oldest_turns_are_left_out_of_a_prompt_that_is_too_long(engine: Engine) -> None:
    session = ChatSession(engine, system="abc", truncate="oldest", **FIELDS)
    for _ in range(6):
        completion = session.respond("word " * 60)
        assert completion.usage is not None
        assert completion.usage.total_tokens <= engine.context_length
    assert len(session.turns) == 6
    plain = ChatSession(engine, system="abc", **FIELDS)
    plain.reset(session.history)
    with pytest.raises(JobError, match=r"\d+ tokens and the context holds \d+"):
        plain.respond("word " * 60)


def test_an_image_is_refused(engine: Engine) -> None:
    session = ChatSession(engine, **FIELDS)
    session.respond("a")
    before = session.history
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    words = {"type": "text", "text": "What is this?"}
    for turn in (session.respond, session.stream):
        with pytest.raises(JobError, match="must be 'text', got 'image_url'") as caught:
            turn({"role": "user", "content": [words, image]})
        assert caught.value.code == "invalid_request"
    assert session.history == before
    session.respond("b")


def test_undo_and_reset(engine: Engine) -> None:
    session = ChatSession(engine, system="abc", **FIELDS)
    session.respond("a")
    session.respond("b")
    assert session.undo().messages == [{"role": "user", "content": "b"}]
    assert len(session.history) == 3
    session.reset()
    assert session.history == [{"role": "system", "content": "abc"}]
    with pytest.raises(JobError, match="no turn to undo"):
        session.undo()
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    session.reset(history, system="def")
    assert session.history == [{"role": "system", "content": "def"}, *history]
    with pytest.raises(JobError, match="the last one has no answer"):
        session.reset([{"role": "user", "content": "x"}])


def test_a_saved_conversation_goes_on_as_the_first_one(engine: Engine, tmp_path: Path) -> None:
    session = ChatSession(engine, system="abc", **FIELDS)
    session.respond("a")
    session.save(tmp_path / "chat.json")
    again = ChatSession.restore(engine, tmp_path / "chat.json", **FIELDS)
    assert again.history == session.history
    assert again.respond("b").text == session.respond("b").text
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no JSON"),
        ("[]", "its format is not"),
        ('{"format": "chatjobs.conversation", "version": 9}', "its version is 9"),
        ('{"format": "chatjobs.conversation", "version": 1}', "no model, system or turns"),
        (
            '{"format": "chatjobs.conversation", "version": 1, "model": "m", "system": "", '
            '"turns": [{"messages": [{"role": "x"}], "answer": {"role": "assistant"}}]}',
            "role",
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(
    engine: Engine, tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "chat.json").write_text(text)
    with pytest.raises(JobError, match=reason) as caught:
        ChatSession.restore(engine, tmp_path / "chat.json")
    assert "is not a saved conversation" in str(caught.value)


def test_a_saved_file_is_json_that_others_can_read(engine: Engine, tmp_path: Path) -> None:
    session = ChatSession(engine, **FIELDS)
    session.respond("a")
    session.save(tmp_path / "chat.json")
    content = json.loads((tmp_path / "chat.json").read_text())
    assert content["turns"][0]["messages"] == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "reset",
    [
        lambda session: session.reset(system="\ud800"),
        lambda session: session.reset(system=5),
        lambda session: session.reset([Turn([{"role": "nobody"}], {"role": "assistant"}, "stop")]),
    ],
)
def test_a_reset_to_what_no_turn_could_use_is_refused(path: Path, reset: Any) -> None:
    session = ChatSession(Engine.load(str(path), device="cpu", dtype="fp32"), system="Be brief.")
    with pytest.raises(JobError) as caught:
        reset(session)
    assert caught.value.code == "invalid_request"
    assert session.history == [{"role": "system", "content": "Be brief."}]


def test_files_that_cannot_be_used_are_named(path: Path, tmp_path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32")
    with pytest.raises(JobError, match="can't be written"):
        ChatSession(engine).save(tmp_path / "absent" / "c")
    with pytest.raises(JobError, match="there is no such file"):
        ChatSession.restore(engine, tmp_path / "absent")


def test_a_turn_has_one_answer(path: Path) -> None:
    session = ChatSession(Engine.load(str(path), device="cpu", dtype="fp32"), max_tokens=2)
    assert session.respond("a", n=1).usage is not None
    with pytest.raises(JobError, match="a turn of a conversation has one answer"):
        session.respond("a", n=2)


def test_a_saved_conversation_has_its_system_text(path: Path, tmp_path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32")
    ChatSession(engine, system="Be brief.").save(tmp_path / "c")
    with pytest.raises(JobError, match="the file has it"):
        ChatSession.restore(engine, tmp_path / "c", system="x")


def test_a_history_over_the_context_says_what_makes_room(engine: Engine) -> None:
    session = ChatSession(engine, **FIELDS)
    session.respond("a")
    turns = session.turns
    with pytest.raises(JobError, match=r'truncate="oldest" leaves out .* undo or reset') as caught:
        session.respond("a b c " * 500)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert session.turns == turns
    with pytest.raises(JobError, match="context") as caught:
        session.respond("a b c " * 500, truncate="oldest")
    assert "undo or reset" not in caught.value.message
    assert session.respond("b", truncate="oldest").usage is not None
