"""Tells an idle worker of new jobs, so that it need not poll for them.

Our producers push to a list of the model when they enqueue: a thread waits on it. RQ's own
producers and tools do not push, so the loop looks at the queues as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import lua
from jobs.store.preludes import QUEUE_LUA

WAKE = lua.load("jobs.store", "wake", QUEUE_LUA)

BLPOP_SECONDS = 10.0  # of one command that waits for a push
THREAD_END_SECONDS = 2.0  # that the end of the thread is waited for: it may just open a connection
QUEUE_POLL_SECONDS = 1.0  # between two looks at the queues; also the pause after a Redis error


# KEYS and ARGV of wake.lua, by name and in order.


class WakeKeys(NamedTuple):
    list: str


class WakeArgs(NamedTuple):
    milliseconds: int | str


class Waker:
    """Calls `on_wake` once for each `arm`: when a job may wait, or Redis has failed.

    waiting: the client whose commands wait for a push; it has no other use. client: for all other
    commands. own_key: the list that wakes this worker.
    """

    def __init__(
        self,
        waiting: redis.Redis,
        client: redis.Redis,
        own_key: str,
        on_wake: Callable[[], None],
    ) -> None:
        waiting.set_retry(Retry(NoBackoff(), 0))  # else `close` would only make it connect again
        self._waiting: Any = waiting
        self._wake_script: Any = client.register_script(WAKE)
        self._own_key, self._on_wake = own_key, on_wake
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
            self._wake_script(
                keys=WakeKeys(self._own_key), args=WakeArgs(int(1000 * BLPOP_SECONDS))
            )

    def pass_on(self, wake_keys: Sequence[str]) -> None:
        """Let another worker wake if this one has no room any more for the job that has woken it.

        wake_keys: the lists for whose jobs there is room. Raises redis.RedisError, and is to be
        called again then.
        """
        with self._lock:
            taken = self._taken
        if taken is not None and taken not in wake_keys:
            self._wake_script(keys=WakeKeys(taken), args=WakeArgs(""))
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
            self._waiting.close()  # also ends the command that waits; the next one may just begin
            self._thread.join(0.01)

    def _loop(self) -> None:
        while self._armed.wait() and not self._closed.is_set():
            with self._lock:
                self._waits_for = waits_for = self._wake_keys
            try:
                woken = self._waiting.blpop([*waits_for, self._own_key], timeout=BLPOP_SECONDS)
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
                taken = None if woken is True else woken[0].decode()
                with self._lock:
                    self._taken = taken if taken in waits_for else None
                self._wake()

    def _wake(self) -> None:
        self._armed.clear()
        self._on_wake()
