"""Appends entries to the token streams of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from jobs import keys, lua
from jobs.stream.entries import Entry

LOG_ENTRIES = 2**16  # approximate length of a log; followers of a longer one get the result instead
LOG_SECONDS = 3600  # expiry of a log after its last entry; end_stream.lua shortens it at the end

APPEND = lua.load("jobs.stream", "append")


class StreamWriter:
    """Appends entries to the logs of jobs and publishes them; keeps no state."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._append = redis.register_script(APPEND)

    def write_many(self, entries: Sequence[Entry]) -> list[bool]:
        """Write entries of any jobs in one round trip, each one atomically.

        Returns for each entry whether it is in the log. False: a later attempt has begun or the
        stream has ended, so the caller no longer owns the job. Raises redis.RedisError.
        """
        if not entries:
            return []
        pipeline = self._redis.pipeline(transaction=False)
        for entry in entries:
            self._append(
                keys=[keys.log(entry.job), keys.live(entry.job)],
                args=[entry.id, entry.payload(), LOG_SECONDS, LOG_ENTRIES],
                client=pipeline,
            )
        return [reply == 1 for reply in pipeline.execute()]
