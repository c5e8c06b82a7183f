"""The circuit breaker of a machine that fails jobs: they cannot start, for want of memory for a
process, or its device fails each of them.

The jobs go back, since others can run them; this worker pauses, and longer after each failure. Then
it tries one job: if that works, it claims as before.
"""

from __future__ import annotations

import logging
import time

from jobs.sizes import counted
from worker.backend import MachineError, Outcome

logger = logging.getLogger(__name__)

OPEN_FAILURES = 3  # in a row, after which the worker reports that it is paused
BREAKER_PAUSE_SECONDS = (0.5, 60.0)  # after a failure: the first, the longest


class CircuitBreaker:
    """Stops claims after failures in a row. `reason`: why the worker claims no jobs, or "".

    A job that cannot start for want of a resource stops them at once, since nothing can run then.
    Internal errors do so when OPEN_FAILURES different jobs had one and none has succeeded since: a
    single bad job, retried, must not stop a worker that runs others.
    """

    def __init__(self) -> None:
        self.reason = ""
        self.epoch = 0  # pauses so far: a job that was started in an earlier epoch proves nothing
        self._failures = 0  # in a row, each of which led to a pause
        self._until = 0.0  # monotonic: end of the pause
        self._probing = False
        self._failed: set[str] = set()  # jobs with an internal error since one has succeeded
        self._needs_end = False  # one of them had generated: only a job that succeeds proves more

    @property
    def half_open(self) -> bool:
        """True if the next job is a probe."""
        return self._failures > 0

    def may_claim(self) -> bool:
        """True if there is neither a pause nor a running probe."""
        return not self._failures or (not self._probing and time.monotonic() >= self._until)

    def claimed(self) -> None:
        """A job was claimed; it is a probe if `half_open`."""
        self._probing = True

    def settled(self) -> None:
        """The claimed jobs have ended or were returned: the next one may be a probe."""
        self._probing = False

    def generates(self, epoch: int) -> None:
        """A job that was started in `epoch` generates."""
        if self._failures and epoch == self.epoch and not self._needs_end:
            self._close()

    def ended(self, job: str, outcome: Outcome, epoch: int, *, generated: bool) -> None:
        """A job that was started in `epoch` has ended. A cancelled job, or one whose request is at
        fault, proves nothing."""
        if epoch != self.epoch:
            return
        error = outcome.error
        if error is None:
            self._close()
        elif isinstance(error, MachineError):
            self._pause(f"jobs cannot be started: {error.message}")
        elif error.code == "internal":
            self._needs_end |= generated
            if not self._failures:
                self._failed.add(job)
            if self._failures or len(self._failed) >= OPEN_FAILURES:
                self._pause(f"jobs fail: {error.message}")

    def _pause(self, reason: str) -> None:
        self.epoch += 1
        self._failures += 1
        first, longest = BREAKER_PAUSE_SECONDS
        self._until = time.monotonic() + min(longest, first * 2 ** min(self._failures - 1, 20))
        if max(self._failures, len(self._failed)) >= OPEN_FAILURES:
            if not self.reason:
                logger.error(
                    "%s in a row: claiming no jobs until a single one works: %s",
                    counted(max(self._failures, len(self._failed)), "failure"),
                    reason,
                )
            self.reason = reason

    def _close(self) -> None:
        self._failures, self._failed, self._needs_end = 0, set(), False
        if self.reason:
            logger.info("a job works: claiming jobs again")
        self.reason = ""
