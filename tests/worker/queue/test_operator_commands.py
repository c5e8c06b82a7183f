"""Commands of operators are tasks that never block the loop, and no answer is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from jobs import JobError, keys
from jobs.store.operator import Answer, Answers, Call, OperatorCommand
from tests.worker.site import Site
from worker.queue.operator_commands import Facts, OperatorCommands, Task


class Flaky(Answers):
    """Redis takes every second call only."""

    calls = 0

    def send(self, command_id: str, answers: Sequence[Answer]) -> None:
        self.calls += 1
        if self.calls % 2:
            raise redis.ConnectionError("gone")
        super().send(command_id, answers)


def load(args: Facts) -> Task:
    for percent in (50, None, 100):
        yield None if percent is None else {"percent": percent}
    if args.get("fails"):
        raise JobError("out_of_memory", "no room")
    return {"model": args["model"]}


def commands(site: Site, commands: OperatorCommands, name: str, **args: object) -> list[Facts]:
    """The answers to a command, whose task is advanced until it has ended."""
    commands.start(OperatorCommand(name, "id1", args))
    commands.start(OperatorCommand(name, "id1", args))  # the message came twice
    for _ in range(8):
        commands.advance()
        try:
            commands.send()
        except redis.ConnectionError:
            commands.send()
    assert not commands.any_running
    return [one.facts for one in Call(site.redis, "w", "id1").answers()]


def test_answers_come_in_order_and_once_whatever_redis_does(site: Site) -> None:
    operator = OperatorCommands(Flaky(site.redis), {"load": load})
    site.redis.rpush(keys.answers("id1"), b"\xff", b"[]", b'{"facts": {}, "final": 1, "error": []}')
    assert commands(site, operator, "load", model="m") == [
        {"percent": 50},
        {"percent": 100},
        {"model": "m"},
    ]
    assert site.redis.keys("*") == []


@pytest.mark.parametrize(
    ("name", "args", "code", "text"),
    [
        ("load", {"model": "m", "fails": True}, "out_of_memory", "no room"),
        ("load", {}, "internal", "KeyError: 'model'"),
        ("eject", {}, "invalid_request", "no command 'eject'; it has: load"),
    ],
)
def test_an_error_is_the_answer_and_ends_no_worker(
    site: Site, name: str, args: dict[str, object], code: str, text: str
) -> None:
    operator = OperatorCommands(Answers(site.redis), {"load": load})
    with pytest.raises(JobError, match=text) as caught:
        commands(site, operator, name, **args)
    assert caught.value.code == code


def test_a_worker_that_stops_answers_what_it_has_not_done(site: Site) -> None:
    operator = OperatorCommands(Answers(site.redis), {"load": load})
    operator.start(OperatorCommand("load", "id1", {"model": "m"}))
    operator.stop()
    operator.send()
    with pytest.raises(JobError, match="the worker stops; the command load is not done"):
        Call(site.redis, "w", "id1").result()
