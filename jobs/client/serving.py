"""Which workers run, and the warning about a job for a model that none of them serves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import Any

from redis import Redis, RedisError

from jobs import keys
from jobs.api.caller import warn_caller

CHECK_SECONDS = 5.0  # between two reads of the workers, by one client


class NobodyServes(UserWarning):
    """A job was submitted for a model that no running worker serves: it waits until one does."""


def read_workers(redis: Redis) -> list[dict[str, Any]]:
    """The status that each running worker publishes, by worker name."""
    found: Any = redis.zrange(keys.WORKERS, 0, -1)
    names = sorted(name.decode() for name in found)
    values: Any = redis.mget([keys.worker(name) for name in names]) if names else []
    return [json.loads(value) for value in values if value is not None]


class ServingCheck:
    """Warns about models that nobody serves, once per model in CHECK_SECONDS. May be shared by
    threads."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._next_read = 0.0
        self._served: set[str] = set()
        self._warned: set[str] = set()

    def warn(self, models: Iterable[str]) -> None:
        """Jobs of these models were enqueued."""
        with self._lock:
            try:
                self._read()
            except RedisError:  # the jobs are enqueued all the same
                return
            unserved = sorted(set(models) - self._served - self._warned)
            self._warned.update(unserved)
            served = ", ".join(sorted(self._served)) or "none"
        for model in unserved:
            warn_caller(
                f"no worker serves {model!r}: its jobs wait until one does (chatjobs work --model "
                f"{model}); models served now: {served}",
                NobodyServes,
            )

    def _read(self) -> None:
        now = time.monotonic()
        if now < self._next_read:
            return
        self._served = {name for worker in read_workers(self._redis) for name in worker["names"]}
        self._warned = set()
        self._next_read = now + CHECK_SECONDS
