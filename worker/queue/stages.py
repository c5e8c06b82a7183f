"""Keeps a stage of the loop that fails because of values in Redis from ending the worker.

Another program may write anything into the keys. A stage that fails on it is logged once, with the
key and what to do, and is repeated until it works. Other stages go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import redis

from jobs.errors import JobError
from jobs.store.damage import Damage, Damaged, causes

logger = logging.getLogger(__name__)

STAGE_PAUSE_SECONDS = 1.0  # before a stage that has failed is repeated


class Stages:
    """The stages of one worker that fail now. `queues`: those that it serves, as they are now."""

    def __init__(self, client: redis.Redis, queues: Collection[str]) -> None:
        self._redis, self._queues = client, queues
        self._failing: dict[str, float] = {}  # when each is repeated (monotonic), by its name

    def run(self, name: str, stage: Callable[[], object]) -> bool:
        """Run a stage, unless it has failed a moment ago. Returns whether it worked. Raises
        JobError, and redis.RedisError if Redis itself fails."""
        if time.monotonic() < self._failing.get(name, 0.0):
            return False
        try:
            stage()
        except Damaged as error:
            self._failed(name, error)
        except (redis.RedisError, JobError):
            raise
        except Exception as error:
            self._failed(name, error)
        else:
            if self._failing.pop(name, None) is not None:
                logger.info("%s works again", name)
            return True
        return False

    def _failed(self, name: str, error: Exception) -> None:
        first = name not in self._failing
        self._failing[name] = time.monotonic() + STAGE_PAUSE_SECONDS
        if not first:
            return
        damaged: list[Damage] = []
        if isinstance(error, Damaged):
            damaged = causes(self._redis, error, self._queues)
        for one in damaged:
            logger.error("%s fails: %s", name, one)
        if not damaged:
            logger.error("%s fails: %s", name, error, exc_info=error)
