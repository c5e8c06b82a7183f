"""Decides whether the worker may claim jobs, and says in the log when that changes."""

from __future__ import annotations

import logging

from worker.queue.rq_presence import RQPresence
from worker.queue.rq_store import RQStore

logger = logging.getLogger(__name__)

BACKLOG_ROWS = 20_000  # rows waiting for Parquet above which no jobs are claimed


class Admission:
    """`pause`: why no jobs are claimed; "" if they are."""

    def __init__(self, presence: RQPresence, store: RQStore) -> None:
        self._presence, self._store = presence, store
        self.pause = ""

    def update(self) -> None:
        """Look at what may stop the worker from claiming jobs."""
        pause = ""
        if not self._presence.may_pause():  # one command, which is all of an idle worker
            pass
        elif self._presence.suspended():
            pause = "suspended by rq"
        else:
            rows, size, max_bytes = self._store.backlog()
            if rows > BACKLOG_ROWS:
                pause = f"more than {BACKLOG_ROWS} rows wait for Parquet"
            elif size > max_bytes:
                pause = f"rows of more than {max_bytes / 1e6:g} MB (outbox_bytes) wait for Parquet"
        if pause and pause != self.pause:
            logger.warning("not claiming jobs: %s", pause)
        elif self.pause and not pause:
            logger.info("claiming jobs again")
        self.pause = pause
