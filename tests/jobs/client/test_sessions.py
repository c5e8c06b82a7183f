"""Opening and forking sessions, and the arguments of their methods."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

import pytest

from jobs import AsyncClient, Client, JobError, Session, keys
from jobs.api.conversation import Turn
from jobs.store.connection.protocol import run_sync
from jobs.store.sessions import fork_session
from jobs.testing import FakeWorker
from tests.waiting import PATIENCE


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    with FakeWorker(lambda request: request.messages[-1].text.upper()) as worker:
        yield worker


@pytest.fixture
def open_client(worker: FakeWorker) -> Client:
    return worker.client()


def refused(code: str, call: Any, *args: Any, **fields: Any) -> str:
    with pytest.raises(JobError) as caught:
        call(*args, **fields)
    assert caught.value.code == code
    return caught.value.message


def stored(client: Client, session: Session) -> dict[str, str]:
    found: Any = client.redis.hgetall(keys.session(session.id))
    return {name.decode(): value.decode() for name, value in found.items()}


# fork


def test_a_fork_into_an_id_that_is_taken_is_refused(open_client: Client) -> None:
    session = open_client.session("s", model="m", system="Be brief.")
    session.send("a", timeout=PATIENCE)
    for name, its_system in (("one", None), ("two", "Be brief."), ("three", "Another.")):
        other = open_client.session(name, model="m", system=its_system)
        message = refused("invalid_request", session.fork, other.id)
        assert message.startswith(f"session {other.id!r} exists already")
        assert other.turns() == []
    assert session.fork("free").history() == session.history()


def test_a_fork_that_is_sent_twice_is_one_session(open_client: Client) -> None:
    session = open_client.session("s", model="m")
    steps = fork_session(session._state, "t", None)
    twice: Any = _SendsTwice(open_client)
    run_sync(steps, twice)
    assert open_client.session("t").model == "m"


class _SendsTwice:
    """A connection that loses the first reply to each command."""

    def __init__(self, client: Client) -> None:
        self._connection = client.connection
        self.redis = client.redis

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        self._connection.run(name, *args, **options)
        return self._connection.run(name, *args, **options)


def test_a_fork_keeps_the_time_to_live_and_the_fields(open_client: Client) -> None:
    session = open_client.session(model="m", ttl=1000, temperature=0.5)
    branch = open_client.session(session.id).fork()
    assert 990 < branch.ttl() <= 1000
    assert 990 < branch.fork(model="other").ttl() <= 1000
    assert stored(open_client, branch)["options"] == '{"temperature": 0.5}'


def test_an_async_fork_keeps_the_time_to_live(worker: FakeWorker) -> None:
    async def fork() -> None:
        async with worker.async_client() as client:
            session = await client.session(model="m", ttl=100)
            branch = await session.fork("t")
            assert 90 < await branch.ttl() <= 100
            with pytest.raises(JobError, match="session 't' exists already"):
                await session.fork("t")

    asyncio.run(fork())


# Opening a session that exists


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttl": 50}, "session 's' was created with ttl=1000, not 50: open it without ttl"),
        (
            {"temperature": 1.5},
            "session 's' was created with temperature=0.5, not 1.5: open it without temperature, "
            "or give it to one turn, as session.send(..., temperature=1.5)",
        ),
        ({"top_k": 5}, "session 's' was created without top_k: open it without top_k, or "),
        ({"system": "No."}, "another system message"),
        ({"model": "other"}, "belongs to model 'm'"),
    ],
)
def test_other_fields_than_those_of_the_session_are_refused(
    open_client: Client, fields: dict[str, Any], message: str
) -> None:
    created: dict[str, Any] = {"model": "m", "system": "Yes.", "ttl": 1000, "temperature": 0.5}
    before = stored(open_client, open_client.session("s", **created))
    assert message in refused("invalid_request", open_client.session, "s", **fields)
    again = open_client.session("s", **created)
    assert stored(open_client, again) == before and again.ttl() <= 1000


def test_fields_of_two_names_are_kept_under_the_one_that_is_sent(open_client: Client) -> None:
    session = open_client.session(model="m", max_completion_tokens=5)
    assert stored(open_client, session)["options"] == '{"max_tokens": 5}'
    open_client.session(session.id, max_tokens=5)


def test_a_session_that_streams_has_whole_answers_and_chunks(open_client: Client) -> None:
    session = open_client.session(model="m", stream=True)
    assert session.send("a b", timeout=PATIENCE).text == "A B"
    assert [chunk.text for chunk in session.submit("c d").stream()] == ["C ", "D"]


# Arguments


@pytest.mark.parametrize("content", [None, 5, 1.5, True])
def test_a_content_that_is_no_message_is_refused(open_client: Client, content: Any) -> None:
    session = open_client.session(model="m")
    for call in (session.send, session.submit, session.edit):
        message = refused("invalid_request", call, content)
        assert message.startswith("a text, a message or a list of messages is needed here; got ")
    for history in (content, "a text"):
        message = refused("invalid_request", session.reset, history)
        assert message.startswith("a list of messages, or of turns, is needed here; got ")
    assert session.turns() == []
    session.send("a", timeout=PATIENCE)


QUESTION: Any = [{"role": "user", "content": "q"}]
ANSWER: Any = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("history", "system", "message"),
    [
        ((), "\ud800", "system: \\ud800 at 0 is a lone surrogate"),
        ((), 5, "system: a text is needed here; got 5"),
        ([Turn([], ANSWER, "stop")], None, "turns[0]: its messages are a list with at least one"),
        ([Turn(cast(Any, 5), ANSWER, "stop")], None, "turns[0]: its messages are a list"),
        ([Turn(QUESTION, QUESTION[0], "stop")], None, "turns[0]: its answer is a message of the"),
        ([Turn(QUESTION, ANSWER, cast(Any, 5))], None, "turns[0].finish_reason: a text is needed"),
        ([Turn(QUESTION, ANSWER, "stop", "\ud800")], None, "turns[0].job: \\ud800 at 0 is a lone"),
        (
            [Turn([{"role": "user", "content": "\ud800"}], ANSWER, "stop")],
            None,
            "messages[0].content: \\ud800 at 0 is a lone surrogate",
        ),
    ],
)
def test_a_reset_to_what_no_turn_could_use_is_refused(
    worker: FakeWorker, open_client: Client, history: Any, system: Any, message: str
) -> None:
    async def reset(name: str) -> None:
        await (await worker.async_client().session(name)).reset(history, system=system)

    session = open_client.session(model="m", system="Yes.")
    session.send("a", timeout=PATIENCE)
    before = session.history()
    assert refused("invalid_request", session.reset, history, system=system).startswith(message)
    assert refused("invalid_request", asyncio.run, reset(session.id)).startswith(message)
    assert session.history() == before


@pytest.mark.parametrize("seconds", ["5", True, float("nan"), [1]])
def test_a_timeout_that_is_no_number_is_refused_before_the_turn(
    open_client: Client, seconds: Any
) -> None:
    session = open_client.session(model="m")
    message = refused("invalid_request", session.send, "a", timeout=seconds)
    assert message.startswith("timeout: a number of seconds, or None, is needed here; got ")
    job = session.submit("a")
    waits = (job.result, open_client.gather, open_client.wait_for_rows)
    for wait, given in zip(waits, ((), (job,), ([job],)), strict=True):
        assert "timeout: a number of seconds" in refused(
            "invalid_request", wait, *given, timeout=seconds
        )
    job.result(timeout=PATIENCE)


def test_an_empty_model_is_called_empty(open_client: Client) -> None:
    assert refused("invalid_request", open_client.session, model="") == "model is empty"
    session = open_client.session(model="m")
    assert refused("invalid_request", session.fork, model="") == "model is empty"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timeout", "unknown field 'timeout'; a session takes the fields of a request, such as "),
        ("mesages", "unknown field 'mesages'; a session takes the fields of a request, such as "),
        ("temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        ("tenant", "unknown field 'tenant'; it is given with a turn, as job={'tenant': ...}"),
        ("request_id", "request_id: it is given with a turn"),
    ],
)
def test_an_unknown_field_of_a_session_is_named_with_what_is_possible(
    open_client: Client, name: str, message: str
) -> None:
    said = refused("invalid_request", open_client.session, model="m", **{name: "5"})
    assert said.startswith(message)
    assert len(said) < 200 and "messages" not in said


def test_an_unknown_field_of_a_turn_is_named_with_what_is_possible(open_client: Client) -> None:
    session = open_client.session(model="m")
    said = refused("invalid_request", session.submit, "a", timeout=5)
    assert said.startswith("unknown field 'timeout'; a session takes the fields of a request")
    said = refused("invalid_request", session.submit, "a", tenant="acme")
    assert said == "unknown field 'tenant'; did you mean 'job.tenant'?"


def test_a_turn_can_be_durable(open_client: Client) -> None:
    session = open_client.session(model="m")
    assert session.submit("a", durable=True).result(timeout=PATIENCE).text == "A"


def test_a_turn_of_an_async_session_can_be_durable(worker: FakeWorker) -> None:
    async def send(client: AsyncClient) -> str:
        session = await client.session(model="m")
        job = await session.submit("a", durable=True)
        return (await job.result(timeout=PATIENCE)).text

    assert asyncio.run(send(worker.async_client())) == "A"
