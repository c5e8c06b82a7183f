"""Waits for new jobs on a thread of its own, so that an idle worker need not poll.

Our producers push to a list of the model when they enqueue; RQ's own producers and tools do not, so
the queues are looked at as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis

LOOK_SECONDS = 1.0  # between two looks at the queues; also the pause after a Redis error


class Waker:
    """Calls `on_wake` once for each `arm`: when a job may wait, or Redis has failed.

    wake_keys: the lists that producers push to. queue_keys: lists that hold jobs.
    """

    def __init__(
        self,
        client: redis.Redis,
        wake_keys: Sequence[str],
        queue_keys: Sequence[str],
        on_wake: Callable[[], None],
    ) -> None:
        self._redis: Any = client
        self._wake_keys, self._queue_keys = list(wake_keys), list(queue_keys)
        self._on_wake = on_wake
        self._armed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name="waker", daemon=True)
        self._thread.start()

    def arm(self) -> None:
        """The queues were empty, and there is room for jobs: wait for the next one."""
        self._armed.set()

    def close(self) -> None:
        """End the thread, after its last look."""
        self._closed = True
        self._armed.set()

    def _loop(self) -> None:
        while True:
            self._armed.wait()
            if self._closed:
                break
            try:
                if not self._job_may_wait():
                    continue
            except redis.RedisError:
                time.sleep(LOOK_SECONDS)
            self._armed.clear()
            self._on_wake()
        self._redis.close()

    def _job_may_wait(self) -> bool:
        if self._redis.blpop(self._wake_keys, timeout=LOOK_SECONDS) is not None:
            return True
        return bool(self._redis.exists(*self._queue_keys))
