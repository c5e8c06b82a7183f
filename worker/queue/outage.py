"""The pauses of the loop after errors of Redis."""

from __future__ import annotations

import logging

import redis

from jobs.sizes import counted

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.1, 5.0)  # pause after an error: the first, the longest


class Outage:
    """The errors of Redis in a row. Logs the first one and the recovery."""

    def __init__(self) -> None:
        self._pause: float | None = None  # after the next error; None while Redis works

    def failed(self, error: redis.RedisError, running: int) -> float:
        """Seconds to pause. `running`: number of jobs that are kept meanwhile."""
        if self._pause is None:
            logger.warning("Redis fails (%s): keeping %s", error, counted(running, "running job"))
            self._pause = RETRY_SECONDS[0]
        pause, self._pause = self._pause, min(2 * self._pause, RETRY_SECONDS[1])
        return pause

    @property
    def lasts(self) -> bool:
        """True from the first error on, until `ended` is called."""
        return self._pause is not None

    def ended(self) -> None:
        """Redis works."""
        if self._pause is not None:
            logger.info("Redis is back")
            self._pause = None
