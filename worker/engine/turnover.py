"""Counts recently finished sequences, to size the claim-ahead queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SECONDS = 0.1  # about twice the time between two claims of a busy worker
MOST = 4  # half batches that are counted: what is claimed here, no other worker takes


class Turnover:
    """A counter. The engine thread counts, any thread may read."""

    def __init__(self, batch: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=batch // 2 * MOST)

    def count(self) -> None:
        """A sequence has ended."""
        self._ends.append(self._clock())

    @property
    def recent(self) -> int:
        """Number of sequences that ended in the last SECONDS."""
        since = self._clock() - SECONDS
        return sum(end >= since for end in tuple(self._ends))
