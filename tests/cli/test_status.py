"""`chatjobs status` names what other programs have written into the keys of chatjobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from jobs import Client, keys
from tests.cli.conftest import Run, Show
from tests.cli.test_output import OURS
from tests.jobs.conftest import STATUS


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
    client.redis.set("rq:failed:chat:m", "x")
    client.redis.sadd("rq:queues", "rq:queue:bulk:m")
    client.redis.zadd(keys.WORKERS, {"w": 1e13})
    client.redis.set(keys.worker("w"), "[]")
    shown = run("status", "--redis", redis_url)
    assert shown.exit_code == 1
    for key in ("rq:scheduled:bulk:m", "rq:wip:chat:m", "rq:failed:chat:m", keys.worker("w")):
        assert f"the key {key} in Redis" in shown.stderr
    found = json.loads(run("status", "--json", "--redis", redis_url).stdout)
    assert [queue["queued"] for queue in found["queues"]] == [0, 1]
    assert len(found["damaged"]) == 4
    client.redis.zadd(keys.RECORDERS, {"r": 1e13})
    client.redis.set(keys.recorder("r"), "{}")
    assert f"the key {keys.recorder('r')} in Redis" in run("status", "--redis", redis_url).stderr
    client.redis.delete(keys.WORKERS)
    client.redis.set(keys.WORKERS, "x")
    assert keys.WORKERS in run("status", "--redis", redis_url).stderr


@pytest.fixture
def evicts(client: Client) -> Iterator[str]:
    """Redis may evict keys; the policy."""
    redis: Any = client.redis
    redis.config_set("maxmemory", "1gb")
    redis.config_set("maxmemory-policy", "allkeys-lru")
    yield "allkeys-lru"
    redis.config_set("maxmemory-policy", "noeviction")
    redis.config_set("maxmemory", "0")


def test_a_policy_that_evicts_is_named_without_a_worker(
    run: Run, redis_url: str, evicts: str
) -> None:
    shown = run("status", "--redis", redis_url)
    assert shown.exit_code == 0
    assert "no workers" in shown.stdout
    assert shown.stderr.count(f"maxmemory-policy {evicts}") == 1
    assert "set maxmemory-policy to noeviction" in shown.stderr
    found = json.loads(run("status", "--json", "--redis", redis_url).stdout)
    assert f"maxmemory-policy {evicts}" in found["eviction"]


def test_the_remedy_for_a_policy_that_evicts_works(
    run: Run, client: Client, redis_url: str, evicts: str
) -> None:
    client.redis.config_set("maxmemory-policy", "noeviction")
    assert "evict" not in run("status", "--redis", redis_url).output
    assert json.loads(run("status", "--json", "--redis", redis_url).stdout)["eviction"] is None


def test_a_policy_that_evicts_is_named_once_with_a_worker(
    run: Run, client: Client, redis_url: str, evicts: str
) -> None:
    client.redis.zadd(keys.WORKERS, {"w1": 1e13})
    found = json.loads(run("status", "--json", "--redis", redis_url).stdout)
    about = {**STATUS, "paused": found["eviction"]}
    client.redis.set(keys.worker("w1"), json.dumps(about))
    assert run("status", "--redis", redis_url).stderr.count("may evict keys") == 1


def test_a_user_who_may_not_read_the_policy_sees_the_rest(
    run: Run, client: Client, redis_url: str, evicts: str
) -> None:
    admin: Any = client.redis
    admin.execute_command("ACL", "SETUSER", "reader", "on", ">word", "~*", "+@all", "-info")
    url = redis_url.replace("unix://", "unix://reader:word@")
    shown = run("status", "--redis", url)
    admin.execute_command("ACL", "DELUSER", "reader")
    assert (shown.exit_code, "no workers" in shown.stdout) == (0, True), shown.stderr


CACHES = {
    "m": {"used": 2**28, "limit": 2**29, "least": 2**26},
    "org/other": {"used": 0, "limit": 2**27, "least": 2**26},
}
ABOUT: dict[str, Any] = {
    **STATUS,
    **{"name": "gpu1-4711-a1b2c3", "models": ["m"], "names": ["m"], "device": "cuda:0"},
    **{
        "memory": {"weights": 2**30, "cache": 2**29, "caches": CACHES},
        "rss": 3 * 2**29,
        "lease_s": 12.0,
    },
}


def interrupted_at(count: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Ctrl-C comes in the pause after so many looks. The pauses."""
    looks: list[float] = []

    def pause(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == count:
            raise KeyboardInterrupt

    monkeypatch.setattr("jobs.cli.status.time.sleep", pause)
    return looks


def test_it_shows_what_an_operator_looks_for_on_80_columns(
    show: Show, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for model, job in (("m", "a"), ("unserved", "b")):
        client.submit(
            {"model": model, "messages": [{"role": "user", "content": "hi"}], "job": {"id": job}}
        )
    client.redis.hset("rq:job:a", "enqueued_at", "2026-01-01T00:00:00.000000Z")
    client.redis.zadd("rq:failed:chat:m", {"c": 2e9})
    client.redis.sadd(keys.OUTBOXES, "r")
    client.redis.xadd(keys.outbox("r"), {"entry": "x"})
    seconds, _ = client.redis.time()
    client.redis.zadd(keys.WORKERS, {ABOUT["name"]: (seconds + 7) * 1000})
    about = {**ABOUT, "results": {"path": "/r", "error": ""}}
    client.redis.set(keys.worker(ABOUT["name"]), json.dumps(about))
    looks = interrupted_at(2, monkeypatch)
    watched = show("status", "--watch", "--interval", "7", "--redis", redis_url, terminal=True)
    assert (watched.code, looks) == (130, [7.0, 7.0])
    text = OURS.sub("", watched.out.split("\x1b[H\x1b[2J")[2])
    sentence, _, tables = text.partition("\n")[2].partition("\n")
    assert sentence.startswith("no worker serves 'unserved' ")
    assert max(map(len, tables.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert ["m", "cuda:0", "1,536", "MiB", "1,536", "MiB"] in [line[1:7] for line in lines]
    assert any(line[-2:] in ([str(age), "s"] for age in range(4, 9)) for line in lines)  # heartbeat
    assert ["org/other", "-", "128", "MiB", "64", "MiB", ABOUT["name"]] in lines
    (served,) = (line for line in lines if line[:1] == ["chat:m"])
    (unserved,) = (line for line in lines if line[:1] == ["chat:unserved"])
    assert served[-1] == "1" and served[-2] == "d" and int(served[-3]) > 100
    assert unserved[-1] == "nobody"
    assert "1 failed job: chatjobs jobs list --state failed" in text
    assert "1 row waits in Redis, of run r, the first one for " in text


@pytest.mark.parametrize(("age", "is_named"), [(None, False), (-9, False), (8, False), (40, True)])
def test_a_worker_that_renews_its_lease_and_does_not_report_is_named(
    run: Run, client: Client, redis_url: str, age: int | None, is_named: bool
) -> None:
    seconds, _ = client.redis.time()
    about = ABOUT if age is None else {**ABOUT, "reported_at": seconds - age}
    client.redis.zadd(keys.WORKERS, {ABOUT["name"]: (seconds + 12) * 1000})
    client.redis.set(keys.worker(ABOUT["name"]), json.dumps(about))
    shown = run("status", "--redis", redis_url)
    assert ("gpu1-4711-a1b2c3 has not reported for 4" in shown.stdout) == is_named
    (worker,) = json.loads(run("status", "--json", "--redis", redis_url).stdout)["workers"]
    assert worker["report_s"] is None if age is None else 0 <= worker["report_s"] - max(0, age) < 9


@pytest.mark.parametrize("columns", [80, 40])
def test_a_live_view_of_many_workers_and_queues_fits_the_screen_with_what_needs_attention(
    show: Show, client: Client, redis_url: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    seconds, _ = client.redis.time()
    for number in range(200):
        name, model = f"gpu{number}-1-a", f"model-{number % 50:02d}"
        paused = "an operator has paused it" if number == 77 else ""
        about = {**ABOUT, "name": name, "models": [model], "names": [model], "paused": paused}
        client.redis.zadd(keys.WORKERS, {name: (seconds + 3600) * 1000})
        client.redis.set(
            keys.worker(name), json.dumps({**about, "memory": {**ABOUT["memory"], "caches": {}}})
        )
    for number in range(51):
        queue = f"rq:queue:chat:model-{number:02d}"
        client.redis.sadd("rq:queues", queue)
        client.redis.rpush(queue, f"job-{number}")
        client.redis.hset(
            f"rq:job:job-{number}", "enqueued_at", f"2026-01-01T00:{number:02d}:00.000000Z"
        )
    monkeypatch.setenv("LINES", "40")
    interrupted_at(1, monkeypatch)
    words = ("status", "--watch", "--redis", redis_url)
    watched = show(*words, terminal=True, columns=columns)
    lines = OURS.sub("", watched.out).splitlines() + watched.err.splitlines()
    assert len(lines) <= 40
    text = "\n".join(lines)
    assert "gpu77-1-a " in text and "chat:model-00 " in text
    assert text.count("… and ") == 2
    assert "no worker serves 'model-50' (models served now: model-00, " in text
    assert "model-09 and 40 more; chatjobs work" in text
    piped = show("status", "--redis", redis_url, terminal=True, columns=columns)
    assert piped.out.count("gpu") >= 200 and "… and " not in piped.out


def test_a_look_that_fails_is_an_object_among_those_of_json(
    show: Show, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise redis.TimeoutError("Timeout reading from socket")

    monkeypatch.setattr("jobs.store.snapshot.read_snapshot", fail)
    interrupted_at(2, monkeypatch)
    watched = show("status", "--watch", "--json", "--redis", redis_url, terminal=True)
    *looks, _ = [json.loads(line)["error"] for line in watched.err.splitlines()]
    assert [one["code"] for one in looks] == ["unavailable"] * 2
    assert watched.out == ""
