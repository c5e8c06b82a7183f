"""One pub/sub connection that all followers and waiters of a client share.

A `Mailbox` listens to the channels of some jobs. The `Hub` subscribes to a channel for its first
mailbox, puts each message into the mailboxes of its channel, and unsubscribes after the last one.
Messages are lost with a connection. So the hub also reports each acknowledged subscription: whoever
reads Redis after that report misses nothing, unless the connection breaks again.
"""

from __future__ import annotations

import asyncio
import queue
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import redis
import redis.asyncio

from jobs.stream.entries import is_end_message

INBOX = 1000  # events that wait for their reader; more are dropped, and the reader is told
EVENTS = 500  # given to a reader at once
CHANNELS = 500  # in one SUBSCRIBE
IDLE_SECONDS = 1.0  # without mailboxes; then the connection is closed
PING_SECONDS = 10.0  # between looks whether something has come; then a PING
CANCEL_SECONDS = 0.1  # until a task that goes on is cancelled again
PINGS = 3  # without a reply; then the connection is dead
PAUSE_SECONDS = 0.2  # before another connection is tried


class Event(NamedTuple):
    """A message, or with `data` None: all that was published before can now be read in Redis, and
    some of it may not come as a message."""

    channel: str
    data: bytes | None


MISSED = Event("", None)  # concerns all channels of the mailbox


class Mailbox:
    """The events of some channels; with `ends_only`, no messages but those of end entries."""

    def __init__(
        self, inbox: Any, channels: Sequence[str], ends_only: bool, close: Callable[[Mailbox], None]
    ) -> None:
        self.channels = tuple(channels)
        self.ends_only = ends_only
        self._inbox = inbox
        self._limit = max(INBOX, 4 * len(self.channels))
        self._missed = False
        self._close = close

    def put(self, event: Event) -> None:
        """Called by the hub."""
        if self._inbox.qsize() >= self._limit:
            self._missed = True
        else:
            self._inbox.put_nowait(event)

    def close(self) -> None:
        """Stop listening. Returns at once."""
        self._close(self)

    def _waiting(self) -> list[Event]:
        """The events that wait, up to EVENTS."""
        events: list[Event] = []
        while len(events) < EVENTS and not self._inbox.empty():
            events.append(self._inbox.get_nowait())
        if not events and self._missed:
            self._missed = False
            events.append(MISSED)
        return events


class SyncMailbox(Mailbox):
    """For readers in threads."""

    def __init__(
        self, channels: Sequence[str], ends_only: bool, close: Callable[[Mailbox], None]
    ) -> None:
        super().__init__(queue.SimpleQueue(), channels, ends_only, close)

    def get(self, seconds: float) -> list[Event]:
        """The next events; none if nothing comes for `seconds`."""
        if events := self._waiting():
            return events
        try:
            first = self._inbox.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return []
        return [first, *self._waiting()]


class AsyncMailbox(Mailbox):
    """For coroutines in the event loop of the hub. One at a time reads it."""

    def __init__(
        self, channels: Sequence[str], ends_only: bool, close: Callable[[Mailbox], None]
    ) -> None:
        super().__init__(queue.SimpleQueue(), channels, ends_only, close)
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        super().put(event)
        _wake(self._reader)

    async def get(self, seconds: float) -> list[Event]:
        """The next events; none if nothing comes for `seconds`."""
        if events := self._waiting():
            return events
        # asyncio.timeout and asyncio.Queue take as long as all else that a message needs.
        loop = asyncio.get_running_loop()
        self._reader = loop.create_future()
        timer = loop.call_later(max(0.0, seconds), _wake, self._reader)
        try:
            await self._reader
        finally:
            timer.cancel()
            self._reader = None
        return self._waiting()


def _wake(reader: asyncio.Future[None] | None) -> None:
    if reader is not None and not reader.done():
        reader.set_result(None)


class _PubSub(redis.asyncio.client.PubSub):
    """Fails with its connection. redis-py's own connects again, under the reader or the writer that
    still uses the connection; the hub opens another one for both."""

    async def _execute(self, conn: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
        return await command(*args, **kwargs)


class Hub:
    """Reads the connection, in one event loop. All methods must be called there."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._boxes: dict[str, list[Mailbox]] = {}  # by channel
        self._changed: set[str] = set()  # channels that were added or removed
        self._wake = asyncio.Event()
        self._subscribed: set[str] = set()  # SUBSCRIBE has been sent
        self._acknowledged: set[str] = set()
        self._heard = False  # something has come since the last look
        self._ended = False

    def add(self, box: Mailbox) -> None:
        for channel in box.channels:
            self._boxes.setdefault(channel, []).append(box)
            if channel in self._acknowledged:
                box.put(Event(channel, None))
            self._changed.add(channel)
        self._wake.set()

    def remove(self, box: Mailbox) -> None:
        """Does nothing for a mailbox that was removed."""
        for channel in box.channels:
            boxes = self._boxes.get(channel, [])
            if box in boxes:
                boxes.remove(box)
                if not boxes:
                    del self._boxes[channel]
                    self._changed.add(channel)
        self._wake.set()

    def end(self, task: asyncio.Task[None]) -> None:
        """Let `task`, which awaits `run`, end soon. A cancellation alone is not enough: redis-py
        sends by asyncio.wait_for, which loses one that comes when the command has just been sent
        (https://github.com/python/cpython/issues/86296, mended in Python 3.12)."""
        self._ended = True
        self._wake.set()
        task.cancel()

    async def run(self, may_end: Callable[[], bool]) -> None:
        """Serve the mailboxes, until there have been none for IDLE_SECONDS and `may_end` agrees, or
        until `end`."""
        self._ended = False
        while not self._ended:
            try:
                async with self._open() as pubsub:
                    if await self._serve(pubsub, may_end):
                        return
            except (redis.RedisError, OSError):
                await asyncio.sleep(PAUSE_SECONDS * random.uniform(0.5, 1.5))
                if not self._boxes and may_end():
                    return

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[redis.asyncio.client.PubSub]:
        pubsub = _PubSub(self._client.connection_pool)
        self._subscribed.clear()
        self._acknowledged.clear()
        self._changed.update(self._boxes)
        try:
            yield pubsub
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _serve(
        self, pubsub: redis.asyncio.client.PubSub, may_end: Callable[[], bool]
    ) -> Literal[True]:
        """Subscribe and unsubscribe as mailboxes come and go. Raises what the reader raises."""
        tasks: list[asyncio.Task[None]] = []
        try:
            while True:
                await self._apply_changes(pubsub)
                if not tasks and self._subscribed:
                    for one in (self._read(pubsub), self._ping(pubsub)):
                        tasks.append(asyncio.create_task(one))
                        tasks[-1].add_done_callback(lambda _: self._wake.set())
                try:
                    async with asyncio.timeout(None if self._boxes else IDLE_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    if may_end():
                        return True
                self._wake.clear()
                if self._ended:
                    return True
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in tasks:
                await _end(task)

    async def _apply_changes(self, pubsub: redis.asyncio.client.PubSub) -> None:
        while self._changed:
            some = [self._changed.pop() for _ in range(min(CHANNELS, len(self._changed)))]
            new = [name for name in some if name in self._boxes and name not in self._subscribed]
            gone = [name for name in some if name not in self._boxes and name in self._subscribed]
            if gone:
                self._subscribed.difference_update(gone)
                self._acknowledged.difference_update(gone)
                await pubsub.unsubscribe(*gone)
            if new:
                self._subscribed.update(new)
                await pubsub.subscribe(*new)

    async def _read(self, pubsub: redis.asyncio.client.PubSub) -> None:
        while True:
            reply: Any = await pubsub.parse_response()
            self._heard = True
            if reply[0] == b"message":
                self._deliver(reply[1].decode(), reply[2])
                continue
            message = await pubsub.handle_message(reply)  # type: ignore[no-untyped-call]
            if message is not None and message["type"] == "subscribe":
                self._acknowledge(message["channel"].decode())

    async def _ping(self, pubsub: redis.asyncio.client.PubSub) -> None:
        """Ends in an error when Redis is silent: a time limit for each message costs more than the
        rest of its way."""
        silences = 0
        while True:
            self._heard = False
            await asyncio.sleep(PING_SECONDS)
            silences = 0 if self._heard else silences + 1
            if silences > PINGS:
                raise redis.ConnectionError("no reply to PING")
            if silences:
                await pubsub.ping()

    def _acknowledge(self, channel: str) -> None:
        if channel in self._subscribed:
            self._acknowledged.add(channel)
        for box in self._boxes.get(channel, ()):
            box.put(Event(channel, None))

    def _deliver(self, channel: str, data: bytes) -> None:
        is_end = is_end_message(data)
        for box in self._boxes.get(channel, ()):
            if is_end or not box.ends_only:
                box.put(Event(channel, data))


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task until it has ended: redis-py may lose a cancellation that meets an error of
    the connection."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_SECONDS)
    await asyncio.gather(task, return_exceptions=True)
