"""The pauses of a worker after errors of Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import redis

from jobs.sizes import counted
from jobs.store.connection.connect import may_pass

Result = TypeVar("Result")

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


def waited_for(call: Callable[[], Result]) -> Result:
    """The result of a call, which is repeated while Redis is away, full or takes no writes. For the
    start of a worker, whose models took minutes to load. Raises other errors of Redis."""
    outage = Outage()
    while True:
        try:
            result = call()
        except redis.RedisError as error:
            if not may_pass(error):
                raise
            time.sleep(outage.failed(error, 0))
        else:
            outage.ended()
            return result
