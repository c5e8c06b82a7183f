"""Commands over pub/sub: which messages are commands, and on which channels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from jobs import keys
from jobs.store.control import Cancel, Control, Shutdown
from jobs.store.operator import OperatorCommand
from tests.worker.site import Site, wait_until

CHANNEL = "rq:pubsub:w1"


@pytest.fixture
def control(site: Site) -> Iterator[Control]:
    with closing(Control(site.redis, CHANNEL)) as control:
        control.subscribe()
        wait_until(lambda: len(site.redis.pubsub_channels()) == 2)
        yield control


def commands(control: Control, count: int) -> list[Cancel | Shutdown | OperatorCommand]:
    found: list[Cancel | Shutdown | OperatorCommand] = []

    def complete() -> bool:
        found.extend(control.commands())
        return len(found) >= count

    wait_until(complete)
    return found


def test_commands_of_chatjobs_and_rq_are_read(site: Site, control: Control) -> None:
    site.redis.publish(keys.CONTROL, json.dumps({"op": "cancel", "job": "a"}))
    site.redis.publish(CHANNEL, json.dumps({"command": "stop-job", "job_id": "b"}))
    site.redis.publish(CHANNEL, json.dumps({"command": "shutdown"}))
    assert commands(control, 3) == [Cancel("a"), Cancel("b"), Shutdown()]


def test_other_messages_are_skipped(site: Site, control: Control) -> None:
    deep = "[" * 100_000
    other_op = json.dumps({"op": "load", "job": "a"})
    job_of_other_type = json.dumps({"op": "cancel", "job": 3})
    for message in (b"\xff", "{", "[]", "3", deep, "{}", other_op, job_of_other_type):
        site.redis.publish(keys.CONTROL, message)
    site.redis.publish(keys.CONTROL, json.dumps({"op": "cancel", "job": "last"}))
    assert commands(control, 1) == [Cancel("last")]


def test_only_operators_command_a_worker(site: Site, control: Control) -> None:
    pause = {"command": "pause", "id": "a", "args": {"b": 1}}
    for message in ({"op": "shutdown"}, {"command": "shutdown"}, pause):
        site.redis.publish(keys.CONTROL, json.dumps(message))
    for wrong in ({"id": "a:b"}, {"id": 3}, {"args": []}, {"command": []}):
        site.redis.publish(CHANNEL, json.dumps(pause | wrong))
    site.redis.publish(CHANNEL, json.dumps(pause))
    assert commands(control, 1) == [OperatorCommand("pause", "a", {"b": 1})]
