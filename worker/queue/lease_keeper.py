"""The thread that renews the worker's lease and does nothing else.

The loop may be busy for a minute with one job: a slow start, or a reply of Redis that doesn't come.
The lease must not depend on it, only on the engine's progress. A process that hangs is ended here,
since nothing else in it may still be able to.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time

import redis

from jobs.store.workers import Workers
from worker.queue.watchdog import Watchdog

logger = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
EXIT_HUNG = 70  # EX_SOFTWARE of sysexits.h
# Of one round of the keeper, whose wait and whose renewal each take a third of one: the process was
# suspended, or the interpreter was blocked, if a round takes longer.
LONGEST_ROUND_LEASES = 2.0
# Hang limits without one renewal, after which the interpreter itself hangs: while the worker
# serves, and while it stops, since it would not receive a second signal.
BLOCKED_LIMITS = 2.0
BLOCKED_LIMITS_STOPPING = 1 / 6


class LeaseKeeper:
    """Renews the lease of a worker from `start` to `stop`. `hang_seconds`: see Watchdog."""

    def __init__(
        self, workers: Workers, watchdog: Watchdog, lease_seconds: float, hang_seconds: float
    ) -> None:
        self._workers, self._watchdog = workers, watchdog
        self._lease_seconds, self._hang_seconds = lease_seconds, hang_seconds
        self._stopping = self._stopped = False
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)

    def start(self) -> None:
        """Renew the lease from now on: the worker has had it since it began to load."""
        self._thread.start()

    def announce_stop(self) -> None:
        """Tell the other workers at once that this one ends soon: that jobs which it could not
        return are then not to blame for its end. May be called from any thread."""
        self._stopping = True
        self._woken.set()

    def stop(self) -> None:
        """End the thread. The lease expires, unless the worker leaves."""
        self._stopped = True
        self._woken.set()
        self._thread.join()
        self._workers.close()

    def _loop(self) -> None:
        fails = False
        begun = time.monotonic()
        try:
            while not self._stopped:
                limits = BLOCKED_LIMITS_STOPPING if self._stopping else BLOCKED_LIMITS
                _end_if_blocked(limits * self._hang_seconds)
                last, begun = begun, time.monotonic()
                if begun - last > LONGEST_ROUND_LEASES * self._lease_seconds:
                    self._watchdog.restart(begun)
                reason = self._watchdog.hang(begun)
                if reason is not None:
                    _leave_process(reason)
                try:
                    self._workers.renew(self._lease_seconds, stopping=self._stopping)
                except redis.RedisError as error:
                    if not fails:
                        logger.warning("the lease cannot be renewed: %s", error)
                    fails = True
                else:
                    fails = False
                self._woken.wait(self._lease_seconds / RENEWALS_PER_LEASE)
                self._woken.clear()
        finally:
            faulthandler.cancel_dump_traceback_later()


def _end_if_blocked(seconds: float) -> None:
    """End the process unless this is called again within `seconds`. A thread of C does that, so it
    also ends a process in which foreign code holds the interpreter and no Python runs."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


def _leave_process(reason: str) -> None:
    """End a process that hangs: without clean-up, which could hang as well."""
    logger.critical("%s: this process ends, and its jobs go to other workers", reason)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    os._exit(EXIT_HUNG)
