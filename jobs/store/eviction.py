"""Refuses submits and claims while Redis may evict keys: jobs and rows could vanish silently.

maxmemory-policy may change at any time, and a fail-over leads to a server with settings of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from redis import Redis, ResponseError

from jobs.errors import JobError

CHECK_SECONDS = 5.0  # between two looks of one client


def eviction(memory: Mapping[str, Any]) -> str:
    """A sentence that says why Redis may evict keys, and what to do; "" if it can't. `memory`: that
    section of INFO."""
    policy = memory.get("maxmemory_policy", "noeviction")
    if not memory.get("maxmemory") or policy == "noeviction":
        return ""
    return (
        f"Redis may evict keys (maxmemory-policy {policy}), so jobs could be lost: set "
        "maxmemory-policy to noeviction"
    )


def read_eviction(redis: Redis) -> str:
    """`eviction` of a server; "" as well if this user may not read it, since workers see it.
    Raises redis.RedisError."""
    try:
        memory: Any = redis.info("memory")
    except ResponseError:
        return ""
    return eviction(memory)


def check_eviction(redis: Redis) -> None:
    """Raises JobError if Redis may evict keys, and redis.RedisError."""
    if reason := eviction(redis.info("memory")):
        raise JobError("unavailable", reason)


class EvictionCheck:
    """Refuses submits while Redis may evict keys. May be shared by threads."""

    def __init__(self) -> None:
        self._next_look = 0.0  # monotonic

    def require(self, redis: Redis) -> None:
        """Raises JobError if keys may be evicted, and redis.RedisError. Looks again after
        CHECK_SECONDS; each time while they may be. No thread waits for the look of another one,
        which a server that hangs does not answer."""
        now = time.monotonic()
        if now < self._next_look:
            return
        if reason := read_eviction(redis):
            raise JobError("unavailable", reason)
        self._next_look = now + CHECK_SECONDS
