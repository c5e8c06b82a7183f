"""Decides whether the worker may claim jobs, and says in the log when that changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from jobs.sizes import size_text
from jobs.store.job_store import JobStore
from jobs.store.presence import Presence

logger = logging.getLogger(__name__)

BACKLOG_ROWS = 20_000  # rows waiting for Parquet above which no jobs are claimed


class Admission:
    """`pause`: why no jobs are claimed; "" if they are. `held`: the same, if an operator has
    stopped the claims. `look_seconds`: between two looks at the settings of Redis. `obstacle`: why
    the backend can't start a request, or ""."""

    def __init__(
        self,
        presence: Presence,
        store: JobStore,
        look_seconds: float,
        obstacle: Callable[[], str] = lambda: "",
    ) -> None:
        self._presence, self._store, self._obstacle = presence, store, obstacle
        self.held = self._found = ""
        self._look_seconds = look_seconds
        self._eviction, self._next_look = "", 0.0  # monotonic

    @property
    def pause(self) -> str:
        return self.held or self._found

    def hold(self, reason: str) -> None:
        """Stop the claims until `release`."""
        self.held = reason
        logger.warning("not claiming jobs: %s", reason)

    def release(self) -> None:
        """Let jobs be claimed again, unless there is another reason not to."""
        if self.held and not self._found:
            logger.info("claiming jobs again")
        self.held = ""

    def update(self) -> None:
        """Look at what may stop the worker from claiming jobs."""
        if (now := time.monotonic()) >= self._next_look:
            self._next_look = now + self._look_seconds
            self._eviction = self._store.eviction()
        pause = self._eviction or self._obstacle()
        if pause or not self._presence.may_pause():  # one command, which is all of an idle worker
            pass
        elif self._presence.suspended():
            pause = "suspended by rq"
        else:
            rows, size, max_bytes = self._store.backlog()
            if rows > BACKLOG_ROWS:
                pause = f"more than {BACKLOG_ROWS} rows wait for Parquet"
            elif size > max_bytes:
                pause = f"rows of more than {size_text(max_bytes)} (outbox_bytes) wait for Parquet"
        if pause and pause != self._found:
            logger.warning("not claiming jobs: %s", pause)
        elif self._found and not pause and not self.held:
            logger.info("claiming jobs again")
        self._found = pause
