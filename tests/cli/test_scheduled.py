"""Scheduled jobs, tenants, failed attempts and paused workers, as the commands show them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import Client, keys
from jobs.store.rq_layout import FAILURES, job_key
from tests.cli.conftest import Run

FAILURE = {"attempt": 1, "at": 1.7e9, "worker": "w-1", "code": "internal", "message": "it broke"}


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


def submit(client: Client, job_id: str, **options: Any) -> None:
    job: Any = {"id": job_id, **options}
    client.submit({"model": "m", "messages": [{"role": "user", "content": "x"}], "job": job})


def announce(client: Client, name: str = "w", **figures: Any) -> None:
    """A worker that reports these figures."""
    memory = {"weights": 0, "cache": 0}
    facts: dict[str, Any] = {
        "name": name,
        "host": "h",
        "models": ["m"],
        "names": ["m"],
        "device": "cpu",
    }
    facts |= {"memory": memory, "running": 0, "tokens_per_second": 0.0, **figures}
    client.redis.zadd(keys.WORKERS, {name: 1000 * time.time() + 60_000})
    client.redis.set(keys.worker(name), json.dumps(facts))


def test_status_shows_scheduled_jobs_and_those_of_tenants(
    run: Run, client: Client, redis_url: str
) -> None:
    submit(client, "later", delay=60)
    submit(client, "a", tenant="a")
    submit(client, "plain")
    result = run("status", "--json", "--redis", redis_url)
    (queue,) = json.loads(result.stdout)["queues"]
    assert (queue["queued"], queue["scheduled"], queue["workers"]) == (2, 1, 0)
    shown = run("status", "--redis", redis_url)
    assert "scheduled" in shown.stdout
    assert "no worker serves 'm' (" in shown.stderr and "): its jobs wait\n" in shown.stderr


def test_status_says_that_a_worker_is_paused_and_why(
    run: Run, client: Client, redis_url: str
) -> None:
    announce(client, paused="the disk is full")
    shown = run("status", "--redis", redis_url)
    assert "paused" in shown.stdout
    assert "worker w claims no jobs: the disk is full\n" in shown.stderr
    announce(client, paused="")
    shown = run("status", "--redis", redis_url)
    assert "paused" not in shown.stdout and shown.stderr == ""


SICK: dict[str, Any] = {"paused": "jobs fail: the device is lost", "healthy": False}


def test_a_host_whose_workers_fail_all_jobs_is_unhealthy(
    run: Run, client: Client, redis_url: str
) -> None:
    words = ("status", "--host", "h", "--redis", redis_url)
    announce(client, **SICK)
    found = run(*words)
    assert found.exit_code == 1
    why = "all workers on host h claim no jobs until one works: jobs fail: the device is lost"
    assert found.stderr.splitlines()[-1] == f"error: {why}"
    found = run(*words, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["workers"][0]["healthy"] is False
    error = json.loads(found.stderr)["error"]
    assert (error["code"], error["message"]) == ("unhealthy", why)
    announce(client, "other", paused="", healthy=True)
    assert run(*words).exit_code == 0
    announce(client, "other", host="elsewhere", paused="", healthy=True)
    assert run(*words).exit_code == 1
    assert run("status", "--redis", redis_url).exit_code == 0


@pytest.mark.parametrize(
    "figures", [{"paused": "suspended by rq", "healthy": True}, {"paused": "of an older worker"}]
)
def test_a_host_that_is_paused_for_another_reason_is_healthy(
    run: Run, client: Client, redis_url: str, figures: dict[str, Any]
) -> None:
    announce(client, **figures)
    assert run("status", "--host", "h", "--redis", redis_url).exit_code == 0


def test_scheduled_jobs_are_listed_and_cancelled(run: Run, client: Client, redis_url: str) -> None:
    submit(client, "later", delay=60)
    submit(client, "a", tenant="a")

    def listed(*words: str) -> list[str]:
        out = run("jobs", "list", "--json", *words, "--redis", redis_url).stdout
        return [json.loads(line)["id"] for line in out.splitlines()]

    assert listed("--state", "scheduled") == ["later"]
    assert listed("--state", "queued") == ["a"]
    assert run("cancel", "later", "a", "--redis", redis_url).stderr == (
        "later: cancelled\na: cancelled\n"
    )
    assert sorted(listed("--state", "cancelled")) == ["a", "later"]


def test_a_file_is_submitted_for_a_tenant_and_later(
    run: Run, client: Client, redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    words = ("--model", "m", "--tenant", "acme", "--delay", "60", "--redis", redis_url)
    (job_id,) = run("submit", str(file), *words).stdout.split()
    job = client.job(job_id)
    assert job.status() == "scheduled"
    assert (job.request.job.tenant, job.request.job.delay) == ("acme", 60)


def test_failed_attempts_are_shown(run: Run, client: Client, redis_url: str) -> None:
    submit(client, "a")
    client.redis.hset(job_key("a"), FAILURES, json.dumps([FAILURE, "nonsense"]))
    line = "attempt 1 failed at 2023-11-14T22:13:20Z on w-1: it broke (internal)\n"
    assert line in run("jobs", "show", "a", "--redis", redis_url).stdout
    found = json.loads(run("jobs", "show", "a", "--json", "--redis", redis_url).stdout)
    (failure,) = found["failures"]
    assert (failure["worker"], failure["code"]) == ("w-1", "internal")
