"""Tells an idle worker of new jobs, so that it need not poll for them.

Our producers push to a list of the model when they enqueue: a thread waits on it. RQ's own
producers and tools do not push, so the loop looks at the queues as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import redis

from jobs.store.wake_lists import WakeLists

BLPOP_SECONDS = 10.0  # of one command that waits for a push
THREAD_END_SECONDS = 2.0  # that the end of the thread is waited for: it may just open a connection
QUEUE_POLL_SECONDS = 1.0  # between two looks at the queues; also the pause after a Redis error


class Waker:
    """Calls `on_wake` once for each `arm`: when a job may wait, or Redis has failed.

    own_key: the list that wakes this worker.
    """

    def __init__(self, lists: WakeLists, own_key: str, on_wake: Callable[[], None]) -> None:
        self._lists, self._own_key, self._on_wake = lists, own_key, on_wake
        self._lock = threading.Lock()  # held for the next three
        self._wake_keys: list[str] = []  # that producers push to
        self._waits_for: list[str] | None = None  # the wake keys of the command that waits
        self._taken: str | None = None  # the wake key whose element has woken this worker
        self._armed = threading.Event()
        self._closed = threading.Event()
        self._next_look = 0.0  # monotonic
        self._thread = threading.Thread(target=self._loop, name="waker", daemon=True)
        self._thread.start()

    def arm(self, wake_keys: Sequence[str]) -> None:
        """The queues were empty, and there is room for jobs: wait for the next one.

        wake_keys: the lists for these jobs. A command that waits for others, as while there was
        room for interactive jobs alone, is ended, and wakes the worker. Raises redis.RedisError.
        """
        with self._lock:
            self._wake_keys = list(wake_keys)
            waits_for_others = self._waits_for not in (None, self._wake_keys)
        self._armed.set()
        if waits_for_others:
            self._lists.wake_worker(self._own_key, BLPOP_SECONDS)

    def pass_on(self, wake_keys: Sequence[str]) -> None:
        """Let another worker wake if this one has no room any more for the job that has woken it.

        wake_keys: the lists for whose jobs there is room. Raises redis.RedisError, and is to be
        called again then.
        """
        with self._lock:
            taken = self._taken
        if taken is not None and taken not in wake_keys:
            self._lists.wake(taken)
        with self._lock:
            if self._taken is taken:
                self._taken = None

    def look(self, job_waits: Callable[[], bool]) -> None:
        """Wake if `job_waits`, which is asked once in QUEUE_POLL_SECONDS while this is armed."""
        now = time.monotonic()
        if self._armed.is_set() and now >= self._next_look:
            self._next_look = now + QUEUE_POLL_SECONDS
            if job_waits():
                self._wake()

    def close(self) -> None:
        """End the thread. Afterwards no command of it takes an element, which would leave another
        worker asleep."""
        self._closed.set()
        self._armed.set()
        deadline = time.monotonic() + THREAD_END_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._lists.interrupt()  # also ends the command that waits; the next one may just begin
            self._thread.join(0.01)

    def _loop(self) -> None:
        while self._armed.wait() and not self._closed.is_set():
            with self._lock:
                self._waits_for = waits_for = self._wake_keys
            taken: str | None = None
            try:
                taken = self._lists.wait([*waits_for, self._own_key], BLPOP_SECONDS)
                woken = taken is not None
            except Exception as error:
                if self._closed.is_set():  # `close` has closed the connection, at any moment
                    break
                if not isinstance(error, redis.RedisError):
                    raise
                woken = True
                if self._closed.wait(QUEUE_POLL_SECONDS):
                    break
            finally:
                with self._lock:
                    self._waits_for = None
            if woken:
                with self._lock:
                    self._taken = taken if taken in waits_for else None
                self._wake()

    def _wake(self) -> None:
        self._armed.clear()
        self._on_wake()
