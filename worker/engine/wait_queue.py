"""The sequences that wait for a slot: interactive ones before bulk ones, each in order of arrival.

If no bulk sequence is running, one is admitted after ADMISSIONS_PER_BULK interactive admissions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from worker.engine.sequence import Sequence

ADMISSIONS_PER_BULK = 16  # interactive admissions before a bulk one


class WaitQueue:
    """`first` is taken before `bulk`."""

    def __init__(self) -> None:
        self.first: deque[Sequence] = deque()
        self.bulk: deque[Sequence] = deque()
        self._overtaken = 0  # interactive sequences taken since a bulk one was taken, or ran

    def __len__(self) -> int:
        return len(self.first) + len(self.bulk)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.first
        yield from self.bulk

    def append(self, sequence: Sequence) -> None:
        """Append a sequence to those of its priority."""
        (self.bulk if sequence.bulk else self.first).append(sequence)

    def refill(self, sequences: Iterable[Sequence]) -> None:
        """Replace all sequences."""
        self.first.clear()
        self.bulk.clear()
        for sequence in sequences:
            self.append(sequence)

    def newest_paused(self, other: Sequence) -> Sequence | None:
        """The newest sequence that waits and keeps its cache, but not `other`."""
        paused = (one for one in reversed([*self]) if one.slot is not None and one != other)
        return next(paused, None)

    def put_back(self, sequence: Sequence, *, first: bool) -> None:
        """Put a sequence before all others; with `first`, also before the interactive ones."""
        (self.first if first else self.bulk).appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, wherever it waits."""
        (self.first if sequence in self.first else self.bulk).remove(sequence)

    def taken(self, sequence: Sequence, *, bulk_runs: bool) -> None:
        """Remove a sequence that is admitted. `bulk_runs`: a bulk sequence runs now."""
        self.remove(sequence)
        self._overtaken = 0 if bulk_runs or not self.bulk else self._overtaken + 1

    def promote_bulk(self) -> Sequence | None:
        """Move the first bulk sequence to the front if its turn has come, and return it."""
        if not self.bulk or self._overtaken < ADMISSIONS_PER_BULK:
            return None
        self._overtaken = 0
        sequence = self.bulk.popleft()
        self.first.appendleft(sequence)
        return sequence
