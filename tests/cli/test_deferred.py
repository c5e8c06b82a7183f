"""Turns that wait for their session, as the commands show and cancel them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import Client, Job
from jobs.cli.waiting import reason
from tests.cli.conftest import Run


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


@pytest.fixture
def turns(client: Client) -> list[Job]:
    """Four turns of one session, the last one of the other priority."""
    session = client.session("s", model="m")
    priorities: list[Any] = ["interactive", "interactive", "interactive", "bulk"]
    return [
        session.submit("x", wait=True, job={"id": f"turn-{number}", "priority": priority})
        for number, priority in enumerate(priorities)
    ]


def listed(run: Run, url: str, *words: str) -> list[str]:
    lines = run("jobs", "list", "--json", *words, "--redis", url).stdout.splitlines()
    return [json.loads(line)["id"] for line in lines]


def test_they_are_counted_and_listed(
    run: Run, client: Client, turns: list[Job], redis_url: str
) -> None:
    assert [job.status() for job in turns] == ["queued", *["deferred"] * 3]
    queues = json.loads(run("status", "--json", "--redis", redis_url).stdout)["queues"]
    counted = {queue["name"]: (queue["deferred"], queue["queued"]) for queue in queues}
    assert counted == {"chat:m": (2, 1), "bulk:m": (1, 0)}
    shown = run("status", "--redis", redis_url)
    assert "deferred" in shown.stdout and "no worker serves 'm'" in shown.stderr
    assert sorted(listed(run, redis_url)) == [job.id for job in turns]
    deferred = listed(run, redis_url, "--state", "deferred", "--model", "m")
    assert sorted(deferred) == ["turn-1", "turn-2", "turn-3"]
    assert "status: deferred\n" in run("jobs", "show", "turn-1", "--redis", redis_url).stdout
    said = reason(client.connection, turns[2])
    assert said == "job turn-2 waits for 2 other turns of session 's'"


@pytest.mark.usefixtures("turns")
def test_all_turns_of_a_model_are_cancelled_together(run: Run, redis_url: str) -> None:
    result = run("jobs", "cancel", "--model", "m", "--redis", redis_url)
    assert (result.exit_code, result.stderr) == (0, "4 jobs cancelled\n")
    assert len(listed(run, redis_url, "--state", "cancelled")) == 4
    (queue, other) = json.loads(run("status", "--json", "--redis", redis_url).stdout)["queues"]
    assert queue["queued"] + queue["deferred"] + other["queued"] + other["deferred"] == 0


def test_the_turns_behind_a_cancelled_and_purged_one_go_on(
    run: Run, client: Client, turns: list[Job], redis_url: str
) -> None:
    for command in ("cancel", "purge"):
        assert run("jobs", command, "turn-1", "--redis", redis_url).exit_code == 0
    assert [job.status() for job in turns] == ["queued", "unknown", "deferred", "deferred"]
    for command in ("cancel", "purge"):
        assert run("jobs", command, "turn-0", "--redis", redis_url).exit_code == 0
    assert [job.status() for job in turns] == ["unknown", "unknown", "queued", "deferred"]
    turns[2].cancel()
    assert turns[3].status() == "queued"
