"""Appends entries to the token streams of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from jobs import keys, lua
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.damage import Damaged
from jobs.store.expiry import LOG_SECONDS
from jobs.stream.entries import Entry

LOG_ENTRIES = 2**16  # approximate length of a log; followers of a longer one get the result instead
LOG_BYTES = 16 * 2**20  # approximate size of its entries

CALL_ENTRIES = 100  # of one call of the script, which Redis runs without a break

APPEND = lua.load("jobs.store", "append")


# ARGV of append.lua before the entries, by name and in order.


class AppendArgs(NamedTuple):
    expire_seconds: int
    max_entries: int
    max_bytes: int


def read_log(
    job_id: str, after: tuple[int, int], count: int, deadline: float | None = None
) -> Steps[list[tuple[bytes, dict[bytes, bytes]]]]:
    """Up to `count` entries of a job's log behind the position `after`: their ids and fields."""
    attempt, seq = after
    call = command("xrange", keys.log(job_id), min=f"({attempt}-{seq}", count=count)
    page: list[tuple[bytes, dict[bytes, bytes]]] = yield from retry(call, deadline)
    return page


class StreamWriter:
    """Appends entries to the logs of jobs and publishes them; keeps no state."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND)

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        """Write entries of any jobs, each one atomically.

        Returns for each entry whether it is in the log. False: a later attempt has begun or the
        stream has ended, so the caller no longer owns the job; or another program has written the
        log. Raises redis.RedisError.
        """
        written: list[bool] = []
        for start in range(0, len(entries), CALL_ENTRIES):
            written += self._write(entries[start : start + CALL_ENTRIES])
        return written

    def _write(self, entries: Sequence[Entry]) -> list[bool]:
        names = [key(entry.job) for entry in entries for key in (keys.log, keys.live)]
        fields = [text for entry in entries for text in (entry.id, entry.payload())]
        replies: Any = self._append(
            keys=names, args=[*AppendArgs(LOG_SECONDS, LOG_ENTRIES, LOG_BYTES), *fields]
        )
        for reply in replies:
            if isinstance(reply, RedisError) and not isinstance(reply, Damaged):
                raise reply
        return [reply == 1 for reply in replies]
