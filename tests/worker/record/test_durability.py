"""The recorder and the durability of Redis: files wait for the append-only file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.embedded import EmbeddedRedis
from tests.worker.record.outboxes import RUN, fill, numbers
from tests.worker.site import Site
from worker.record import recorder as module
from worker.record.part_plans import PartPlans
from worker.record.recorder import NotDurable


class Commands:
    """A connection that records commands, with fixed replies for some."""

    def __init__(self, real: Any, **answers: Any) -> None:
        self._real, self._answers, self.seen = real, answers, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def execute_command(self, name: str, *words: Any) -> Any:
        self.seen.append((name, *words))
        answer = self._answers[name]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def info(self, *_: Any) -> Any:
        return {"aof_enabled": self._answers["aof"]}

    def config_get(self, *_: Any) -> Any:
        return {"appendfsync": self._answers["policy"]}


@pytest.mark.parametrize(
    ("aof", "reply", "policy", "waits"),
    [
        (0, None, "", False),
        (1, [1, 0], "everysec", False),
        (1, [0, 0], "everysec", True),
        (1, [0, 0], "no", False),
        (1, redis.ResponseError("unknown command"), "everysec", False),
    ],
)
def test_a_file_waits_until_redis_has_synced(
    make: Any, aof: int, reply: Any, policy: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FSYNC_SECONDS", 0.05)
    a = make("a")
    a._redis = Commands(a._redis, aof=aof, WAITAOF=reply, policy=policy)
    if waits:
        with pytest.raises(NotDurable):
            a._wait_until_durable()
    else:
        a._wait_until_durable()
    assert bool(a._redis.seen) == bool(aof)


def test_rows_are_written_with_an_append_only_file(tmp_path: Path) -> None:
    with EmbeddedRedis(append_only=True) as server:
        site = Site(server.url, tmp_path / "results")
        jobs = site.submit_many([f"q{i}" for i in range(30)], run=RUN)
        site.burst()
        site.assert_settled(jobs, RUN)
        site.close()


def test_the_connection_never_reconnects(site: Site, make: Any) -> None:
    """On a new connection, which has written nothing, WAITAOF would return at once."""
    a = make("a")
    mine = a._redis.client_id()
    fill(site, 1)
    site.redis.client_kill_filter(_id=str(mine))
    with pytest.raises(redis.ConnectionError):
        a._plan_next(RUN)
    assert a._plan_next(RUN) is not None


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


def test_an_older_redis_gets_scripts_without_flags(site: Site) -> None:
    class Old:
        def __init__(self) -> None:
            self.scripts: list[str] = []

        def info(self, *_: Any) -> Any:
            return {"redis_version": "6.2.14"}

        def register_script(self, text: str) -> None:
            self.scripts.append(text)

    old = Old()
    PartPlans(old, "a", 1.0)  # type: ignore[arg-type]
    assert not any(text.startswith("#!") for text in old.scripts)
