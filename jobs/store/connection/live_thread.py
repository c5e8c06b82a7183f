"""The `Hub` of a sync client: it runs in a thread of its own while there are mailboxes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import redis.asyncio

from jobs.store.connection.live import Hub, Mailbox, SyncMailbox

CLOSE_SECONDS = 5.0  # limit for the end of the thread


class LiveThread:
    """Starts the thread for the first mailbox. `connect` makes the client that it uses. May be
    shared by threads, and used again in a forked process."""

    def __init__(self, connect: Callable[[], redis.asyncio.Redis]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._running: _Running | None = None

    @property
    def channels(self) -> int:
        """Number of channels that mailboxes listen to."""
        running = self._running
        return running.channels if running is not None else 0

    def listen(self, channels: Sequence[str], ends_only: bool) -> SyncMailbox:
        with self._lock:
            running = self._running
            if running is None or running.pid != os.getpid():
                running = self._running = _Running(self._connect(), self._may_end)
            box = SyncMailbox(channels, ends_only, lambda box: self._remove(running, box))
            running.boxes += 1
            running.channels += len(box.channels)
            running.loop.call_soon_threadsafe(running.hub.add, box)
        return box

    def close(self) -> None:
        """End the thread and close its connection. Mailboxes get no more events."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None and running.pid == os.getpid():
            running.stop()

    def _remove(self, running: _Running, box: Mailbox) -> None:
        with self._lock:
            running.boxes -= 1
            running.channels -= len(box.channels)
            with suppress(RuntimeError):  # the loop has ended
                running.loop.call_soon_threadsafe(running.hub.remove, box)

    def _may_end(self, running: _Running) -> bool:
        with self._lock:
            if running.boxes:
                return False
            if self._running is running:
                self._running = None
            return True


class _Running:
    """A thread with its event loop and its hub."""

    def __init__(self, client: redis.asyncio.Redis, may_end: Callable[[_Running], bool]) -> None:
        self.pid = os.getpid()
        self.boxes = self.channels = 0
        self.loop = asyncio.new_event_loop()
        self.hub = Hub(client)
        self._client = client
        self._task = self.loop.create_task(self._serve(may_end))
        self._thread = threading.Thread(target=self._run, name="chatjobs-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.hub.end, self._task)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(self._task)
        finally:
            self.loop.close()

    def _serve(self, may_end: Callable[[_Running], bool]) -> Coroutine[Any, Any, None]:
        async def serve() -> None:
            try:
                await self.hub.run(lambda: may_end(self))
            finally:
                await self._client.aclose()

        return serve()
