"""Tells an idle worker of new jobs, so that it need not poll for them.

Our producers push to a list of the model when they enqueue: a thread waits on it. RQ's own
producers and tools do not push, so the loop looks at the queues as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

WAIT_SECONDS = 10.0  # of one command that waits for a push
LOOK_SECONDS = 1.0  # between two looks at the queues; also the pause after a Redis error


class Waker:
    """Calls `on_wake` once for each `arm`: when a job may wait, or Redis has failed.

    client: for the thread alone.
    """

    def __init__(self, client: redis.Redis, on_wake: Callable[[], None]) -> None:
        client.set_retry(Retry(NoBackoff(), 0))  # else `close` would only make it connect again
        self._redis: Any = client
        self._wake_keys: list[str] = []  # that producers push to
        self._on_wake = on_wake
        self._armed = threading.Event()
        self._closed = threading.Event()
        self._next_look = 0.0  # monotonic
        self._thread = threading.Thread(target=self._loop, name="waker", daemon=True)
        self._thread.start()

    def arm(self, wake_keys: Sequence[str]) -> None:
        """The queues were empty, and there is room for jobs: wait for the next one.

        wake_keys: the lists for these jobs. A command that waits already goes on with its own.
        """
        self._wake_keys = list(wake_keys)
        self._armed.set()

    def look(self, job_waits: Callable[[], bool]) -> None:
        """Wake if `job_waits`, which is asked once in LOOK_SECONDS while this is armed."""
        now = time.monotonic()
        if self._armed.is_set() and now >= self._next_look:
            self._next_look = now + LOOK_SECONDS
            if job_waits():
                self._wake()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._armed.set()
        self._redis.close()  # also ends the command that waits

    def _loop(self) -> None:
        while self._armed.wait() and not self._closed.is_set():
            try:
                if self._redis.blpop(self._wake_keys, timeout=WAIT_SECONDS) is None:
                    continue
            except redis.RedisError:
                if self._closed.wait(LOOK_SECONDS):
                    break
            self._wake()

    def _wake(self) -> None:
        self._armed.clear()
        self._on_wake()
