"""The recorder and the durability of Redis: files wait for its disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs import keys
from jobs.embedded import EmbeddedRedis
from jobs.store import durable
from jobs.store.durable import NotDurable, wait_until_durable
from tests.jobs.record.outboxes import RUN, fill, numbers, plan_next
from tests.worker.site import PATIENCE, Site


class Redis:
    """A server that replies to INFO with `states`, one after the other, the last one for ever."""

    def __init__(self, states: list[dict[str, Any]], policy: str | None = "everysec") -> None:
        self.states, self.policy, self.looks = list(states), policy, 0

    def info(self, *_: str) -> dict[str, Any]:
        self.looks += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return {"run_id": "a", "aof_enabled": 1, "aof_last_write_status": "ok", **state}

    def config_get(self, *_: str) -> dict[str, str]:
        if self.policy is None:
            raise redis.exceptions.NoPermissionError(
                "no permissions to run the 'config|get' command"
            )
        return {"appendfsync": self.policy}


IDLE: dict[str, Any] = {"aof_pending_bio_fsync": 0}
SYNCING = {"aof_pending_bio_fsync": 1}
FAILING = {"aof_last_write_status": "err"}
OTHER = {"run_id": "b"}


@pytest.mark.parametrize(
    ("states", "policy", "looks"),
    [
        ([IDLE], "everysec", 5),
        ([IDLE], None, 5),  # the user may not read the policy
        ([IDLE, SYNCING, SYNCING, IDLE], "everysec", 7),
        ([IDLE, IDLE, SYNCING, SYNCING, IDLE], "everysec", 6),
        ([SYNCING], "always", 2),
        ([SYNCING], "no", 2),
        ([{"aof_enabled": 0}], "everysec", 2),
    ],
)
def test_a_write_is_durable_when_the_sync_after_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, states: list[Any], policy: str | None, looks: int
) -> None:
    monkeypatch.setattr(durable, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(durable, "_wait_for_replicas", lambda *_: None)
    server = Redis(states, policy)
    wait_until_durable(server, PATIENCE)  # type: ignore[arg-type]
    assert server.looks == looks


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([SYNCING], "has not synced"),
        ([IDLE, IDLE, SYNCING], "has not synced"),
        ([IDLE, FAILING], "can't write its append-only file"),
        ([IDLE, OTHER], "was restarted"),
    ],
)
def test_a_write_that_is_not_durable(
    monkeypatch: pytest.MonkeyPatch, states: list[Any], reason: str
) -> None:
    monkeypatch.setattr(durable, "SYNC_SECONDS", 0.01)
    monkeypatch.setattr(durable, "_wait_for_replicas", lambda *_: None)
    seconds = 0.2 if reason == "has not synced" else PATIENCE
    with pytest.raises(NotDurable, match=reason):
        wait_until_durable(Redis(states), seconds)  # type: ignore[arg-type]


def test_rows_are_written_with_an_append_only_file(tmp_path: Path) -> None:
    with EmbeddedRedis(append_only=True) as server:
        site = Site(server.url, tmp_path / "results")
        jobs = site.submit_many([f"q{i}" for i in range(30)], run=RUN)
        site.burst()
        site.assert_settled(jobs, RUN)
        site.close()


def test_the_parts_of_several_runs_wait_together(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make("a")
    waits = []
    monkeypatch.setattr(a, "_wait_until_durable", lambda: waits.append(None))
    for run in ("r1", "r2", "r3"):
        fill(site, 2, run=run)
    assert a._write_due_parts()
    assert len(waits) == 1
    assert [len(site.rows(run)) for run in ("r1", "r2", "r3")] == [2, 2, 2]


def test_an_adopted_plan_waits_as_well(
    site: Site, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(site, 3)
    assert plan_next(make("dead", plan_seconds=0.0)) is not None
    a = make("a")
    waits = []
    monkeypatch.setattr(a, "_wait_until_durable", lambda: waits.append(numbers(site)))
    assert a._write_due_parts()
    assert waits == [[]]


def test_a_worker_warns_if_redis_has_no_append_only_file(
    site: Site, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with EmbeddedRedis(append_only=True) as server:
        make("a", url=server.url).start()
        assert not caplog.messages
    make("b").start()
    assert "appendonly no" in caplog.text


def test_a_worker_says_if_redis_could_pack_jobs(
    site: Site, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make("a").start()
    assert "hash-max-listpack-value" not in caplog.text
    with site.settings(**{"hash-max-listpack-value": "64"}):
        make("b").start()
        assert "at most 64 bytes (hash-max-listpack-value): with 2048" in caplog.text
        caplog.clear()
        site.redis.execute_command(
            *("ACL", "SETUSER", "worker", "on", "nopass", "allkeys", "+@all", "-config")
        )
        make("c", url=site.url.replace("//", "//worker@", 1)).start()
        site.redis.acl_deluser("worker")
    assert "hash-max-listpack-value" not in caplog.text


def test_a_plan_that_redis_has_lost_is_not_written(site: Site, make: Any) -> None:
    a = make("a")
    fill(site, 3)
    lost = plan_next(a)
    site.redis.delete(keys.parts(RUN))
    a._execute(lost)
    assert numbers(site) == []
    fill(site, 2, first=3)
    assert a._write_due_parts()
    assert numbers(site) == [0, 1, 2, 3, 4]


def test_rows_are_written_while_redis_is_full(site: Site, make: Any) -> None:
    fill(site, 5)
    site.redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(redis.OutOfMemoryError):
            fill(site, 1)
        assert make("a")._write_due_parts()
    finally:
        site.redis.config_set("maxmemory", "0")
    assert numbers(site) == list(range(5))
