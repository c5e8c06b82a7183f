"""Opening and forking sessions, and the arguments of their methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobs import Client, JobError, Session, keys
from jobs.testing import FakeWorker


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






class _SendsTwice:
    """A connection that loses the first reply to each command."""

    def __init__(self, client: Client) -> None:
        self._connection = client.connection
        self.redis = client.redis

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        self._connection.run(name, *args, **options)
        return self._connection.run(name, *args, **options)






# Opening a session that exists






# Arguments








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




