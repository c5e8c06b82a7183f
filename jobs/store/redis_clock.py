"""Notices that the clock of Redis was set back: by NTP, by hand, or by a fail-over.

Rows, locks and retries do not wait longer for it, since their scripts compare times. But Redis
itself keeps keys that expire for as much longer, which users should know.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

LEAST_SECONDS = 1.0  # a smaller step is not worth a word


class RedisClock:
    """The clock of one Redis, as a worker sees it. `behind`: seconds until it has the time again
    that it had before it was set back; 0 while it has not been."""

    def __init__(self) -> None:
        self.behind = 0.0
        self._latest = 0.0

    def seen(self, now: float) -> None:
        """Redis has replied with this time, in seconds."""
        before, self.behind = self.behind, 0.0
        if now < self._latest - LEAST_SECONDS:
            self.behind = self._latest - now
        self._latest = max(self._latest, now)
        if self.behind > before + LEAST_SECONDS:
            logger.warning(
                "the clock of Redis was set back by %.0f s: keys that expire, such as results, are "
                "kept for so much longer, and job.at is a time of that clock",
                self.behind - before,
            )
