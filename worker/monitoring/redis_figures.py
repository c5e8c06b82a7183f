"""Figures of Redis for /metrics: the queues of all models, and the rows that wait for Parquet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from jobs.store.backlog import Unwritten, read_unwritten
from jobs.store.connection.connect import connect, limit_waits
from jobs.store.queue_depths import read_queues

ANSWER_SECONDS = 1.0  # a scrape waits for each reply of Redis for so long
RETRY_SECONDS = 5.0  # after an error, scrapes do not ask Redis for so long
MAX_QUEUES = 500  # anybody may submit jobs to a queue of any name


class Snapshot(NamedTuple):
    """`queues`: as `read_queues` gives them."""

    queues: Sequence[dict[str, Any]]
    unwritten: Unwritten


class RedisFigures:
    """Reads Redis over a connection of its own, when it is asked. Used by one thread."""

    def __init__(self, url: str | None) -> None:
        self._redis = connect(url)
        limit_waits(self._redis, ANSWER_SECONDS)
        self._next_try = 0.0  # monotonic

    def read(self) -> Snapshot | None:
        """The figures now; None if Redis does not reply."""
        if time.monotonic() < self._next_try:
            return None
        try:
            queues = read_queues(self._redis)[:MAX_QUEUES]
            return Snapshot(queues, read_unwritten(self._redis))
        except redis.RedisError:
            self._next_try = time.monotonic() + RETRY_SECONDS
            return None

    def close(self) -> None:
        self._redis.close()
