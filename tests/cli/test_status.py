"""`chatjobs status` names what other programs have written into the keys of chatjobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from jobs import Client, keys
from tests.cli.conftest import Run


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        client.serving = None
        yield client


@pytest.mark.parametrize("words", ["status", "limits", "jobs list", "cancel job", "submit - -m m"])
def test_a_user_without_rights_learns_what_to_do(
    run: Run, client: Client, redis_url: str, words: str
) -> None:
    admin: Any = client.redis
    admin.execute_command("ACL", "SETUSER", "nobody", "on", ">word", "+ping", "~none")
    url = redis_url.replace("unix://", "unix://nobody:word@")
    refused = run(*words.split(), "--redis", url, input='{"prompt": "a"}')
    admin.execute_command("ACL", "DELUSER", "nobody")
    assert refused.exit_code == 3
    assert "refused a command" in refused.stderr
    assert "the user 'nobody' lacks a right: docs/operations.md (Users)" in refused.stderr
    assert "pipeline" not in refused.stderr


def test_status_of_a_host_without_worker_says_so(run: Run, client: Client, redis_url: str) -> None:
    shown = run("status", "--host", "foo", "--redis", redis_url)
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[0] == "no workers on host foo"


def test_damaged_keys_are_named_and_the_exit_code_is_1(
    run: Run, client: Client, redis_url: str
) -> None:
    client.submit({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert run("status", "--redis", redis_url).exit_code == 0
    client.redis.set("rq:scheduled:bulk:m", "x")
    client.redis.set("rq:wip:chat:m", "x")
    client.redis.sadd("rq:queues", "rq:queue:bulk:m")
    client.redis.zadd(keys.WORKERS, {"w": 1e13})
    client.redis.set(keys.worker("w"), "[]")
    shown = run("status", "--redis", redis_url)
    assert shown.exit_code == 1
    for key in ("rq:scheduled:bulk:m", "rq:wip:chat:m", keys.worker("w")):
        assert f"the key {key} in Redis" in shown.stderr
    found = json.loads(run("status", "--json", "--redis", redis_url).stdout)
    assert [queue["queued"] for queue in found["queues"]] == [0, 1]
    assert len(found["damaged"]) == 3
    client.redis.delete(keys.WORKERS)
    client.redis.set(keys.WORKERS, "x")
    assert keys.WORKERS in run("status", "--redis", redis_url).stderr
