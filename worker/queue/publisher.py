"""Writes deltas to the token streams in Redis, off the engine's thread.

Deltas are buffered per job: the first is sent at once, later ones are joined for HOLD_SECONDS. The
entries of all jobs go out in one round trip. While Redis is slow, the next entries grow: a buffer
never holds more than the output itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from jobs.store.stream import StreamWriter
from jobs.stream.delta import Delta, join
from jobs.stream.entries import Entry

HOLD_SECONDS = 0.02  # time between two entries of a job, in which deltas are joined


class StreamBuffer:
    """Unsent deltas of one attempt at one job. Used only by the loop's thread."""

    def __init__(self, job: str, attempt: int) -> None:
        self.job, self.attempt = job, attempt
        self.refused = False  # a later attempt owns the stream
        self._seq = 0
        self._deltas: list[Delta] = []
        self._due = 0.0  # the first delta is sent at once

    def add(self, deltas: Sequence[Delta]) -> None:
        """Buffer deltas."""
        self._deltas.extend(deltas)

    def due(self, now: float) -> bool:
        """True if the next entry should be sent."""
        return bool(self._deltas) and not self.refused and now >= self._due

    def take(self, now: float) -> Entry:
        """Remove all deltas from the buffer and return them as the next entry."""
        self._seq += 1
        self._due = now + HOLD_SECONDS
        taken, self._deltas = self._deltas, []
        return Entry(self.job, self.attempt, self._seq, join(taken))


class Publisher:
    """Writes the streams of all running jobs. Used only by the loop's thread."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[tuple[StreamBuffer, Entry]] = []

    def flush(self, streams: Iterable[StreamBuffer], *, everything: bool = False) -> None:
        """Send the entries that are due, or all of them. Raises redis.RedisError; unsent entries
        then go out with the next flush, and the log ignores those that it already has."""
        self._send()
        now = time.monotonic()
        self._unsent = [
            (stream, stream.take(now))
            for stream in streams
            if stream.due(float("inf") if everything else now)
        ]
        self._send()

    def _send(self) -> None:
        if not self._unsent:
            return
        written = self._writer.write_many([entry for _, entry in self._unsent])
        for (stream, _), accepted in zip(self._unsent, written, strict=True):
            stream.refused = stream.refused or not accepted
        self._unsent = []
