"""The slots of a batch: the shares of interactive and bulk sequences, and the room for more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jobs.errors import invalid

RESERVED_SHARE = 16  # one slot of this many is kept for interactive sequences without `preempt`
PAUSED_SHARE = 8  # one more slot for this many, for sequences that keep their cache while paused
BATCH_PER_QUEUED = 2  # slots of the batch per queued sequence, see `Slots.room`
RECENT_SECONDS = 0.1  # about twice the time between two claims of a busy worker
MOST_HALF_BATCHES = 4  # that are counted: what is claimed here, no other worker takes


@dataclass(frozen=True, slots=True)
class Slots:
    """Bulk sequences use at most `batch - reserved` slots. With `preempt`, they are paused when
    interactive ones find no free slot."""

    batch: int  # maximum number of running sequences
    reserved: int = 0
    preempt: bool = False

    @classmethod
    def share(cls, batch: int, reserved: int | None, preempt: bool) -> Slots:
        """The slots of a batch, with the default for None: with `preempt`, interactive sequences
        need no free slot. A batch of one runs one sequence after the other. Raises JobError."""
        if batch < 1:
            raise invalid(f"max_batch must be at least 1, got {batch}", "max_batch")
        if reserved is None:
            reserved = 0 if preempt else min(batch - 1, max(1, batch // RESERVED_SHARE))
        if not 0 <= reserved < batch:
            raise invalid(
                f"interactive_slots must be 0 to {batch - 1}, fewer than max_batch, got {reserved}",
                "interactive_slots",
            )
        return cls(batch, reserved, preempt and batch > 1)

    @property
    def paused(self) -> int:
        """Number of paused sequences that keep their cache."""
        return max(1, self.batch // PAUSED_SHARE) if self.preempt else 0

    def room(
        self, *, bulk: bool, bulk_running: int, bulk_all: int, interactive: int, ended: int = 0
    ) -> int:
        """Number of sequences that the batch and a short queue can still take. The queue keeps the
        batch full while further jobs are claimed: it holds as many sequences as `ended` in about
        that time, and at least half a batch. One bulk sequence may always wait, since the scheduler
        does not let it starve."""
        most = self.batch + max(self.batch // BATCH_PER_QUEUED, ended)
        if bulk:
            return max(0, most - self.reserved - bulk_all - interactive, 1 - bulk_all)
        return max(0, most - interactive - (0 if self.preempt else bulk_running))


class FinishRate:
    """Counts the sequences that have ended a moment ago, as `Slots.room` needs them. The engine
    thread counts, any thread may read. `batch`: slots."""

    def __init__(self, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.total = 0
        self._ends: deque[float] = deque(maxlen=batch // 2 * MOST_HALF_BATCHES)

    def count(self) -> None:
        """A sequence has ended."""
        self.total += 1
        self._ends.append(self._clock())

    @property
    def recent(self) -> int:
        """Number of sequences that ended in the last RECENT_SECONDS."""
        since = self._clock() - RECENT_SECONDS
        return sum(end >= since for end in tuple(self._ends))
