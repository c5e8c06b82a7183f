"""The wake lists: idle workers wait on those of the queues for whose jobs they have room.

A script that puts a job into a queue pushes to the list of the queue (`wake` in queue.lua). Here
workers wait, and wake each other or themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import lua
from jobs.store.preludes import QUEUE_LUA

WAKE = lua.load("jobs.store", "wake", QUEUE_LUA)


# KEYS and ARGV of wake.lua, by name and in order.


class WakeKeys(NamedTuple):
    list: str


class WakeArgs(NamedTuple):
    milliseconds: int | str


class WakeLists:
    """waiting: the client whose commands wait for a push; it has no other use. client: for all
    other commands. All methods but `interrupt` raise redis.RedisError."""

    def __init__(self, waiting: redis.Redis, client: redis.Redis) -> None:
        # Else `interrupt` would only make it connect again.
        waiting.set_retry(Retry(NoBackoff(), 0))
        self._waiting: Any = waiting
        self._wake: Any = client.register_script(WAKE)

    def wait(self, lists: Sequence[str], seconds: float) -> str | None:
        """Take an element of one of the lists. Returns the list; None if none has got one in this
        time."""
        found = self._waiting.blpop(lists, timeout=seconds)
        return None if found is None else found[0].decode()

    def interrupt(self) -> None:
        """End the `wait` of another thread, with an error. One that just begins goes on."""
        self._waiting.close()

    def wake(self, queue_list: str) -> None:
        """Wake one of the workers that wait on the list of a queue."""
        self._wake(keys=WakeKeys(queue_list), args=WakeArgs(""))

    def wake_worker(self, own_list: str, seconds: float) -> None:
        """Wake the worker that waits on its own list, if it does in this time."""
        self._wake(keys=WakeKeys(own_list), args=WakeArgs(int(1000 * seconds)))
