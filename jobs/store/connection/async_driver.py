"""The connections of one asyncio client: a few for commands, which go in pipelines, and one for
messages."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import redis.asyncio

from jobs.store.connection.live import AsyncMailbox, Hub
from jobs.store.connection.protocol import READS_PER_SECOND, Command

PIPELINES = 4  # at the same time, each on a connection of its own
PIPELINE_COMMANDS = 200  # commands in one pipeline


class AsyncConnection:
    """A `Connection` for `run_async` and `iterate_async`, for one event loop."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.redis: Any = client
        self._commands: deque[tuple[asyncio.Future[Any], str, tuple[Any, ...], dict[str, Any]]]
        self._commands = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._hub = Hub(client)
        self._hub_task: asyncio.Task[None] | None = None
        self._channels = 0

    def run(self, name: str, *args: Any, **options: Any) -> asyncio.Future[Any]:
        """The reply to one Redis command. Commands that wait for a connection share a pipeline."""
        reply = asyncio.get_running_loop().create_future()
        self._commands.append((reply, name, args, options))
        if len(self._senders) < PIPELINES:
            sender = asyncio.create_task(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return reply

    async def run_many(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to some commands."""
        return await asyncio.gather(*[self.run(name, *args) for name, *args in commands])

    def listen(self, channels: Sequence[str], ends_only: bool) -> AsyncMailbox:
        """A mailbox of these channels; `close` it."""
        box = AsyncMailbox(channels, ends_only, self._remove)
        self._channels += len(box.channels)
        self._hub.add(box)
        if self._hub_task is None or self._hub_task.done():
            self._hub_task = asyncio.create_task(self._hub.run(lambda: not self._channels))
        return box

    def silence(self, seconds: float) -> float:
        """See `SyncConnection.silence`."""
        return max(seconds, self._channels / READS_PER_SECOND) * random.uniform(0.75, 1.25)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        if self._hub_task is not None:
            self._hub.end(self._hub_task)
            await asyncio.gather(self._hub_task, return_exceptions=True)
        await self.redis.aclose()

    def _remove(self, box: Any) -> None:
        self._channels -= len(box.channels)
        self._hub.remove(box)

    async def _send(self) -> None:
        """Send commands until none waits."""
        while self._commands:
            some = [
                self._commands.popleft() for _ in range(min(PIPELINE_COMMANDS, len(self._commands)))
            ]
            some = [one for one in some if not one[0].done()]  # the others were cancelled
            pipeline = self.redis.pipeline(transaction=False)
            for _, name, args, options in some:
                getattr(pipeline, name)(*args, **options)
            try:
                replies = await pipeline.execute(raise_on_error=False)
            except Exception as error:
                replies = [error] * len(some)
            for (future, *_), reply in zip(some, replies, strict=True):
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    failure = copy.copy(reply)  # each is raised, and gets a traceback of its own
                    failure.__cause__ = reply
                    future.set_exception(failure)
                else:
                    future.set_result(reply)
