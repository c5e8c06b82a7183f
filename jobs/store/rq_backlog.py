"""The number of rows that wait for Parquet. All workers count together: each one that asks counts a
portion of the outboxes, and gets the last complete count. For people, jobs/store/unwritten.py
counts exactly, and by run."""

from __future__ import annotations

from typing import Any, NamedTuple

from redis import Redis

from jobs import keys, lua
from jobs.store.limits import read_limits

COUNT = lua.load("jobs.store", "count")

PORTION = 1000  # outboxes: about three milliseconds of Redis
PAUSE_MILLISECONDS = 2000  # between two counts
EXPIRE_MILLISECONDS = 15_000  # more than a worker's pause between two checks


# KEYS and ARGV of count.lua, by name and in order.


class CountKeys(NamedTuple):
    outboxes: str
    backlog: str


class CountArgs(NamedTuple):
    outbox_prefix: str
    portion: int
    pause_milliseconds: int
    expire_milliseconds: int


class Backlog(NamedTuple):
    """The rows that wait for Parquet."""

    rows: int
    bytes: int
    max_bytes: int


class BacklogCounter:
    """Counts the rows in one Redis, together with the other workers."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._count = redis.register_script(COUNT)

    def read(self) -> Backlog:
        """The rows in the outboxes of all runs, and the limit of their bytes."""
        args = CountArgs(keys.outbox(""), PORTION, PAUSE_MILLISECONDS, EXPIRE_MILLISECONDS)
        found: Any = self._count(keys=CountKeys(keys.OUTBOXES, keys.BACKLOG), args=args)
        rows, size = found
        return Backlog(rows, size, read_limits(self._redis).outbox_bytes)
