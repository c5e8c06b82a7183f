"""Appends entries to the token streams of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError, ResponseError

from jobs import keys, lua
from jobs.stream.entries import Entry

LOG_ENTRIES = 2**16  # approximate length of a log; followers of a longer one get the result instead
LOG_BYTES = 16 * 2**20  # approximate size of its entries
LOG_SECONDS = 3600  # expiry of a log after its last entry; end_stream.lua shortens it at the end

APPEND = lua.load("jobs.stream", "append")


# KEYS and ARGV of append.lua, by name and in order.


class AppendKeys(NamedTuple):
    log: str
    live: str


class AppendArgs(NamedTuple):
    entry_id: str
    payload: str
    expire_seconds: int
    max_entries: int
    max_bytes: int


class StreamWriter:
    """Appends entries to the logs of jobs and publishes them; keeps no state."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND)

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        """Write entries of any jobs in one round trip, each one atomically.

        Returns for each entry whether it is in the log. False: a later attempt has begun or the
        stream has ended, so the caller no longer owns the job; or another program has written the
        log. Raises redis.RedisError.
        """
        if not entries:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for entry in entries:
            self._append(
                keys=AppendKeys(log=keys.log(entry.job), live=keys.live(entry.job)),
                args=AppendArgs(
                    entry_id=entry.id,
                    payload=entry.payload(),
                    expire_seconds=LOG_SECONDS,
                    max_entries=LOG_ENTRIES,
                    max_bytes=LOG_BYTES,
                ),
                client=pipeline,
            )
        replies = pipeline.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, RedisError) and type(reply) is not ResponseError:
                raise reply
        return [reply == 1 for reply in replies]
