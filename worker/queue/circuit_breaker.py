"""The circuit breaker of a machine on which jobs cannot start, for want of memory for a process.

The jobs go back, since others can run them; this worker pauses, and longer after each failure. Then
it tries one job: if that works, it claims as before.
"""

from __future__ import annotations

import logging
import time

from jobs.errors import JobError

logger = logging.getLogger(__name__)

OPEN_FAILURES = 3  # in a row, after which the worker reports that it is paused
PAUSE_SECONDS = (0.5, 60.0)  # after a failure: the first, the longest


class CircuitBreaker:
    """Stops claims after failures in a row. `reason`: why the worker claims no jobs, or ""."""

    def __init__(self) -> None:
        self.reason = ""
        # Number of failures ever: what started in an earlier generation proves nothing.
        self.generation = 0
        self._failures = 0
        self._until = 0.0  # monotonic: end of the pause
        self._probing = False

    @property
    def half_open(self) -> bool:
        """Whether the next job is a probe."""
        return self._failures > 0

    def may_claim(self) -> bool:
        """Whether neither a pause nor a probe goes on."""
        return not self._failures or (not self._probing and time.monotonic() >= self._until)

    def claimed(self) -> None:
        """A job was claimed; it is a probe if `half_open`."""
        self._probing = True

    def settled(self) -> None:
        """The claimed jobs have ended or were returned: the next one may be a probe."""
        self._probing = False

    def failed(self, error: JobError) -> None:
        """A job could not be run on this machine."""
        self.generation += 1
        self._failures += 1
        first, longest = PAUSE_SECONDS
        self._until = time.monotonic() + min(longest, first * 2 ** min(self._failures - 1, 20))
        if self._failures >= OPEN_FAILURES:
            if not self.reason:
                logger.error(
                    "%d jobs in a row could not be started (%s): not claiming jobs until a single "
                    "one works",
                    self._failures,
                    error.message,
                )
            self.reason = f"jobs cannot be started: {error.message}"

    def worked(self, generation: int) -> None:
        """A job that was started in `generation` generates. Called on the engine's thread."""
        if self._failures and generation == self.generation:
            self._failures = 0
            if self.reason:
                logger.info("a job works: claiming jobs again")
            self.reason = ""
