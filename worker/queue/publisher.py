"""Pieces of answers → the token streams in Redis, off the generation thread.

Pieces are kept per job until they are due: the first at once, later ones together with what came
meanwhile; all jobs' entries go out in one round trip. When Redis lags, more comes together in each
job's next entry, so what is held is never more than the answers themselves.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jobs.api.answer import FinishReason, TokenLogprob
from jobs.stream.entries import Entry, StreamWriter, piece, pieces_payload
from worker.backend import Delta

HOLD_SECONDS = 0.02  # how long a later piece waits for company


@dataclass
class _Part:
    """What came together of one choice."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class StreamBuffer:
    """The stream of one attempt at one job. `add` may be called from another thread."""

    def __init__(self, job: str, attempt: int) -> None:
        self.job, self.attempt = job, attempt
        self.refused = False  # a later attempt writes this stream now
        self._seq = 0
        self._arrived: deque[Delta] = deque()
        self._due = 0.0  # the first piece goes at once

    def add(self, pieces: Sequence[Delta]) -> bool:
        """Keep pieces until they are due. True if nothing was waiting before them."""
        first = not self._arrived
        self._arrived.extend(pieces)
        return first

    def due(self, now: float) -> bool:
        """Whether what came together should go out."""
        return bool(self._arrived) and not self.refused and now >= self._due

    def take(self, now: float) -> Entry:
        """The next entry; what is in it is no longer held here."""
        self._seq += 1
        self._due = now + HOLD_SECONDS
        parts: dict[int, _Part] = {}
        while self._arrived:
            new = self._arrived.popleft()
            part = parts.setdefault(new.choice, _Part())
            part.content.append(new.content)
            part.reasoning.append(new.reasoning)
            part.logprobs.extend(new.logprobs)
            part.finish_reason = new.finish_reason or part.finish_reason
        payload = pieces_payload(
            piece(
                choice,
                "".join(part.content),
                "".join(part.reasoning),
                part.logprobs,
                part.finish_reason,
            )
            for choice, part in sorted(parts.items())
        )
        return Entry(self.job, self.attempt, self._seq, payload)


class Publisher:
    """Writes the streams of all jobs under way. Used by the service's thread alone."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[tuple[StreamBuffer, Entry]] = []

    def flush(self, streams: Iterable[StreamBuffer], *, everything: bool = False) -> None:
        """Send what is due, or everything. Raises redis.RedisError; nothing is lost then: it goes
        out with the next flush, and the log knows what it has already."""
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
        for (stream, _), there in zip(self._unsent, written, strict=True):
            stream.refused = stream.refused or not there
        self._unsent = []
