"""The connections of one sync client: a pool for commands, and one for messages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import redis
import redis.asyncio

from jobs.store.connection.live import SyncMailbox
from jobs.store.connection.live_thread import LiveThread
from jobs.store.connection.protocol import READS_PER_SECOND, Command

COMMANDS = 32  # at the same time, each on a connection of its own


class SyncConnection:
    """A `Connection` for `run_sync` and `iterate_sync`. May be shared by threads."""

    def __init__(
        self, client: redis.Redis, connect_live: Callable[[], redis.asyncio.Redis]
    ) -> None:
        self.redis: Any = client
        self._live = LiveThread(connect_live)
        self._free = threading.BoundedSemaphore(COMMANDS)

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        """The reply to one Redis command."""
        with self._free:
            return getattr(self.redis, name)(*args, **options)

    def run_many(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to some commands, in one round trip."""
        with self._free:
            pipeline = self.redis.pipeline(transaction=False)
            for name, *args in commands:
                getattr(pipeline, name)(*args)
            replies: list[Any] = pipeline.execute()
            return replies

    def listen(self, channels: Sequence[str], ends_only: bool) -> SyncMailbox:
        """A mailbox of these channels; `close` it."""
        return self._live.listen(channels, ends_only)

    def silence(self, seconds: float) -> float:
        """Seconds to wait for a message before the state is read: about `seconds`, longer if many
        jobs are waited for."""
        return max(seconds, self._live.channels / READS_PER_SECOND) * random.uniform(0.75, 1.25)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._live.close()
        self.redis.close()
