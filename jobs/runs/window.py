"""The rows of a run that are in Redis: a bounded part of the data set, however large that is."""

from __future__ import annotations

import time

from jobs.runs.written_rows import WrittenRows
from jobs.store.run_rows import RowJob, RowState, RunRows

CHECK_SECONDS = 5.0  # between two looks at whether jobs were deleted
# A row that has left Redis and is in no file for so long was lost. A shared disk may show a new
# file late.
LOST_SECONDS = 60.0


class Window:
    """Rows from their enqueueing until they are in a file. `poll` moves them on.

    A row that Redis has lost leaves the window: a later pass over the data set enqueues it again.
    """

    def __init__(
        self, rows: RunRows, written: WrittenRows, *, lost_seconds: float = LOST_SECONDS
    ) -> None:
        self._rows, self._written, self._lost_seconds = rows, written, lost_seconds
        # By their numbers.
        self._open: dict[int, RowJob] = {}  # their jobs have not ended
        self._ended: dict[int, RowJob] = {}  # and these wait for Parquet
        self._ended_at: dict[int, float] = {}  # monotonic, when that was seen
        self._next_check = 0.0
        self._complete_since: float | None = None  # nothing waits for Parquet

    @property
    def open(self) -> int:
        """Number of rows whose jobs have not ended."""
        return len(self._open)

    @property
    def ended(self) -> int:
        """Number of rows that have ended and are in no file yet."""
        return len(self._ended)

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def __contains__(self, number: int) -> bool:
        return number in self._open or number in self._ended

    def add(self, number: int, row: RowJob) -> None:
        """The job of a sample is in Redis."""
        self._open[number] = row

    def add_ended(self, number: int, row: RowJob) -> None:
        """The row of a sample is on its way to Parquet."""
        self._ended[number] = row
        self._ended_at[number] = time.monotonic()

    def poll(self) -> None:
        """Look at Redis and at the files. Raises redis.RedisError, LeaseLost, and InvalidRequest if
        rows may be in a file that can't be read."""
        self._poll_open()
        self._written.refresh()
        written = self._written.rows
        for some in (self._open, self._ended):
            self._forget({number: one for number, one in some.items() if number in written})
        self._find_lost()

    def withdraw(self) -> int:
        """Take the jobs that wait out of their queues. Returns how many."""
        gone = self._rows.forget([*self._open.values()], withdraw=True)
        for number, is_gone in zip([*self._open], gone, strict=True):
            if is_gone:
                del self._open[number]
        return sum(gone)

    def _poll_open(self) -> None:
        check_jobs = time.monotonic() >= self._next_check
        states = self._rows.states([*self._open.values()], check_jobs=check_jobs)
        if check_jobs:
            self._next_check = time.monotonic() + CHECK_SECONDS
        for number, state in zip([*self._open], states, strict=True):
            if state is RowState.ENDED:
                self.add_ended(number, self._open.pop(number))
            elif state is RowState.NONE:
                del self._open[number]

    def _find_lost(self) -> None:
        """Drop rows that have ended and are neither in Redis nor in a file: Redis or the files have
        lost them."""
        if not self._ended or self._rows.has_unwritten():
            self._complete_since = None
            return
        now = time.monotonic()
        since = self._complete_since = self._complete_since or now
        if now - since >= self._lost_seconds:
            self._written.refresh()
            self._written.check()
            ended = self._ended.items()
            self._forget({n: one for n, one in ended if self._ended_at[n] <= since})
            self._complete_since = None

    def _forget(self, rows: dict[int, RowJob]) -> None:
        """Rows whose job has not ended, as one that was requeued, stay in Redis."""
        self._rows.forget([*rows.values()])
        for number in rows:
            self._open.pop(number, None)
            self._ended.pop(number, None)
            self._ended_at.pop(number, None)
