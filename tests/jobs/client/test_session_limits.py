"""Sessions at their limits, in a full Redis, and with values that other programs have written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from jobs import Client, JobError, Session, keys
from jobs.store import sessions
from jobs.store.connection.protocol import Steps
from tests.waiting import PATIENCE

PAIR = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def pairs(count: int, text: str = "") -> list[Any]:
    messages = []
    for number in range(count):
        messages.append({"role": "user", "content": f"q{number}"})
        messages.append({"role": "assistant", "content": f"a{number}{text}"})
    return messages


@pytest.fixture
def session(client: Client) -> Session:
    client.serving = None
    found = client.session("s", model="m", system="Be brief.")
    found.reset(pairs(3))
    return found


def test_a_full_redis_lets_sessions_be_read_opened_and_shortened(
    client: Client, session: Session
) -> None:
    client.redis.config_set("maxmemory", 1)
    try:
        assert session.undo().messages[0]["content"] == "q2"
        assert len(client.session("s").turns()) == 2
        for refused in (
            session.fork,
            lambda: session.reset(PAIR),
            lambda: session.reset(system="x"),
            lambda: client.session("new", model="m"),
            lambda: session.submit("more"),
        ):
            with pytest.raises(JobError, match="full") as caught:
                refused()
            assert caught.value.code == "queue_full"
        session.reset()
        assert session.turns() == []
        session.delete()
        with pytest.raises(JobError, match="was deleted"):
            session.turns()
    finally:
        client.redis.config_set("maxmemory", 0)


def test_a_session_of_10_000_turns_is_reset_and_forked(session: Session) -> None:
    session.reset(pairs(10_000))
    assert len(session.fork("other").turns()) == 10_000


def test_of_two_undos_at_once_each_removes_a_turn(
    client: Client, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)
    read: Callable[[str], Steps[Any]] = sessions._read_stored
    first = threading.local()

    def together(name: str) -> Steps[Any]:
        found = yield from read(name)
        if not hasattr(first, "done"):
            first.done = True
            both.wait(timeout=PATIENCE)
        return found

    monkeypatch.setattr(sessions, "_read_stored", together)
    undone: list[str] = []

    def undo() -> None:
        undone.append(client.session("s").undo().messages[0]["content"])

    threads = [threading.Thread(target=undo) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert sorted(undone) == ["q1", "q2"]
    assert len(session.turns()) == 1


def test_an_undo_that_is_sent_again_removes_one_turn(client: Client, session: Session) -> None:
    names = sessions.CutSessionKeys(keys.session("s"), keys.turns("s"), keys.open_turns("s"))
    args = sessions.CutSessionArgs("s", "keep", 3, 2, "token")
    for _ in range(2):
        assert client.redis.eval(sessions.CUT, 3, *names, *args) == [b"done"]
    assert len(session.turns()) == 2


def test_a_history_that_is_sent_again_erases_no_later_turn(
    client: Client, session: Session
) -> None:
    names = sessions.ReplaceSessionKeys(
        keys.session("s"), keys.turns("s"), keys.open_turns("s"), keys.LIMITS
    )
    args = sessions.ReplaceSessionArgs("s", 0, "", 0, 9, 1000, 1000, "[]", "token")
    (later, *_) = client.redis.lrange(keys.turns("s"), 0, 0)
    for _ in range(2):
        assert client.redis.eval(sessions.REPLACE, 4, *names, *args) == [b"done"]
        client.redis.rpush(keys.turns("s"), later)  # another job has ended
    assert len(session.turns()) == 2


def test_a_system_message_and_a_history_have_the_limits_of_requests(
    client: Client, session: Session
) -> None:
    with pytest.raises(JobError, match=r"9\.0 MB in its system .*\(message_bytes\) is 8\.4 MB"):
        client.session("k", model="m", system="x" * 9_000_000)
    with pytest.raises(JobError, match="no session 'k'"):
        client.session("k")
    with pytest.raises(JobError, match=r"MB of turns, and the limit \(session_bytes\) is 8\.4 MB"):
        session.reset(pairs(2, "x" * 5_000_000))
    assert len(session.turns()) == 3
    client.redis.hset(keys.LIMITS, mapping={"message_bytes": 45, "session_bytes": 100})
    with pytest.raises(JobError, match="message_bytes"):
        session.reset(system="Be very, very brief.")
    with pytest.raises(JobError, match="session_bytes"):
        session.fork()


@pytest.mark.parametrize("turn", ["junk", "[]", '{"messages":[3],"answer":{}}', "[" * 100_000])
def test_a_foreign_turn_is_named(client: Client, session: Session, turn: str) -> None:
    client.redis.rpush(keys.turns("s"), turn)
    for read in (session.history, session.turns, session.undo, session.fork):
        with pytest.raises(JobError, match=r"chatjobs:\{s\}:turns .*LREM"):
            read()
    session.reset(PAIR)
    assert len(session.turns()) == 1


def test_foreign_options_are_named(client: Client, session: Session) -> None:
    for options in (
        "junk",
        "[]",
        b"\xff",
        "[" * 100_000,
        '{"messages":[]}',
        '{"job":{"session":"other"}}',
        '{"self":1}',
        '{"edit":true}',
        '{"temperature":"hot"}',
        '{"max_tokens":1' + "0" * 5000 + "}",
    ):
        client.redis.hset(keys.session("s"), "options", options)
        with pytest.raises(JobError, match=r"the field options of .*HDEL") as caught:
            client.session("s")
        assert caught.value.code == "internal" and len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("ttl", ttl)
            for ttl in ("1e30", "nan", "abc", "", "0", "-5", "1.5", "9" * 5000, b"\xff")
        ),
        ("model", b"\xff"),
        ("model", ""),
        ("system", b"\xff"),
    ],
)
def test_a_foreign_field_is_named_before_anything_changes(
    client: Client, session: Session, field: str, value: Any
) -> None:
    before = len(session.turns())
    client.redis.hset(keys.session("s"), field, value)
    refused: list[Callable[[], object]] = [lambda: client.session("s")]
    if field == "ttl":
        refused += [session.undo, session.reset, lambda: session.reset(PAIR)]
    if field == "system":
        refused += [session.history, session.fork]
    else:
        refused.append(lambda: session.submit("more"))
    for call in refused:
        with pytest.raises(JobError, match=f"the field {field} of .*(HSET|HDEL)") as caught:
            call()
        assert caught.value.code == "internal" and len(caught.value.message) < 400
    assert client.redis.llen(keys.turns("s")) == before
    assert not client.redis.exists(keys.open_turns("s"))
    session.delete()


def test_a_foreign_system_text_is_mended_by_a_reset(client: Client, session: Session) -> None:
    client.redis.hset(keys.session("s"), "system", b"\xff")
    session.reset(PAIR, system="New.")
    assert session.history()[0]["content"] == "New."


@pytest.mark.parametrize("size", ["x", "nan", "-1", "inf", "1.5", "9" * 20])
def test_a_foreign_size_is_computed_again(client: Client, session: Session, size: str) -> None:
    client.redis.hset(keys.session("s"), "bytes", size)
    session.submit("more")
    found = client.redis.lrange(keys.turns("s"), 0, -1)
    assert int(client.redis.hget(keys.session("s"), "bytes") or 0) == sum(map(len, found))


@pytest.mark.parametrize("key", [keys.session("s"), keys.turns("s"), keys.open_turns("s")])
def test_a_session_with_a_key_of_another_type_is_named_and_can_be_deleted(
    client: Client, session: Session, key: str
) -> None:
    client.redis.delete(key)
    client.redis.set(key, "x")
    with pytest.raises(JobError, match="RENAME"):
        session.undo()
    session.delete()
    with pytest.raises(JobError, match="was deleted"):
        session.undo()
    client.session("s", model="m")
