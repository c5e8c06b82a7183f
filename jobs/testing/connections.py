"""Connections to an in-memory Redis that run the fake worker while they wait.

A call that would block first lets the worker advance, step by step, until there is a reply. So no
thread and no sleep is needed, and every run of a test takes the same steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import fakeredis
from fakeredis import FakeAsyncRedisConnection, FakeRedisConnection
from redis import ResponseError

from jobs import keys, lua
from jobs.client.aio import AsyncClient
from jobs.client.client import Client
from jobs.store.connection.async_driver import AsyncConnection
from jobs.store.connection.connect import DEFAULT_URL
from jobs.store.connection.live import Event
from jobs.store.connection.protocol import Command
from jobs.store.connection.sync_driver import SyncConnection
from jobs.store.damage import classified
from jobs.store.rq_layout import CHANGING_FIELDS
from jobs.testing.stepper import Stepper

OUTBOX = keys.outbox("")  # a client reads the newest entry to wait until it is in Parquet
POLL_SECONDS = 0.05  # how long a call waits before it looks again for jobs of other threads


def connected_client(server: fakeredis.FakeServer, stepper: Stepper) -> Client:
    """A `Client` of the in-memory server."""
    client = Client(DEFAULT_URL)  # sends nothing until its connection is replaced
    client.connection = _Connection(server, stepper)
    client.serving = None  # the fake worker answers jobs of all models
    return client


def connected_async_client(server: fakeredis.FakeServer, stepper: Stepper) -> AsyncClient:
    """An `AsyncClient` of the in-memory server."""
    return _AsyncClient(server, stepper)


class _AsyncClient(AsyncClient):
    def __init__(self, server: fakeredis.FakeServer, stepper: Stepper) -> None:
        super().__init__(DEFAULT_URL)
        self._producer = connected_client(server, stepper)
        self.connection = _AsyncConnection(server, stepper)


class _FakeConnection(FakeRedisConnection):
    """Raises the errors of the store's own connections."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return _classified(super().read_response(*args, **options))
        except ResponseError as error:
            raise classified(error) from None


class _AsyncFakeConnection(FakeAsyncRedisConnection):
    """`_FakeConnection` for asyncio."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return _classified(await super().read_response(*args, **options))
        except ResponseError as error:
            raise classified(error) from None


def _classified(reply: Any) -> Any:
    """The reply, with the errors inside it classified."""
    if isinstance(reply, list):
        return [_classified(one) for one in reply]
    return classified(reply) if isinstance(reply, Exception) else reply


class ScriptingRedis(fakeredis.FakeRedis):
    """Runs scripts without their line of flags, which fakeredis does not know."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        super().__init__(server=server, connection_class=_FakeConnection)

    def register_script(self, script: Any) -> Any:
        return super().register_script(lua.split_flags(script)[1])

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        return super().eval(lua.split_flags(script)[1], numkeys, *keys_and_args)

    def info(self, *sections: Any, **options: Any) -> Any:
        return {"aof_enabled": 1}  # for `submit(durable=True)`, with every write synced; never full

    def config_get(self, *names: Any, **options: Any) -> Any:
        return {"appendfsync": "always"}


class _AsyncRedis(fakeredis.FakeAsyncRedis):
    """`ScriptingRedis` for asyncio."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        super().__init__(server=server, connection_class=_AsyncFakeConnection)

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        return super().eval(lua.split_flags(script)[1], numkeys, *keys_and_args)


class _Connection(SyncConnection):
    def __init__(self, server: fakeredis.FakeServer, stepper: Stepper) -> None:
        super().__init__(ScriptingRedis(server=server), lambda: _AsyncRedis(server=server))
        self._stepper = stepper

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        _before(self._stepper, name, args)
        reply = super().run(name, *args, **options)
        _after(self._stepper, name, args)
        return reply

    def listen(self, channels: Sequence[str], ends_only: bool) -> Any:
        return _Mailbox(self.redis.pubsub(), channels, self._stepper)


class _AsyncConnection(AsyncConnection):
    def __init__(self, server: fakeredis.FakeServer, stepper: Stepper) -> None:
        super().__init__(_AsyncRedis(server=server))
        self._server = server
        self._stepper = stepper

    def run(self, name: str, *args: Any, **options: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._run(name, args, options))

    async def run_many(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self.redis.pipeline(transaction=False)
        for name, *args in commands:
            getattr(pipeline, name)(*args)
        replies: list[Any] = await pipeline.execute()
        return replies

    def listen(self, channels: Sequence[str], ends_only: bool) -> Any:
        redis: Any = fakeredis.FakeRedis(server=self._server)
        return _AsyncMailbox(redis.pubsub(), channels, self._stepper)  # it never blocks

    async def _run(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        _before(self._stepper, name, args)
        reply = await getattr(self.redis, name)(*args, **options)
        _after(self._stepper, name, args)
        return reply


def _before(stepper: Stepper, name: str, args: tuple[Any, ...]) -> None:
    if name == "xrevrange" and args[0].startswith(OUTBOX):
        stepper.record()


def _after(stepper: Stepper, name: str, args: tuple[Any, ...]) -> None:
    if name == "hmget" and tuple(args[1]) == CHANGING_FIELDS:
        stepper.poll(args[0])


class _Mailbox:
    """A mailbox with a subscription of its own."""

    def __init__(self, pubsub: Any, channels: Sequence[str], stepper: Stepper) -> None:
        self._pubsub = pubsub
        self._stepper = stepper
        pubsub.subscribe(*channels)

    def get(self, seconds: float) -> list[Event]:
        return _wait(self._read, seconds, self._stepper)

    def close(self) -> None:
        self._pubsub.close()

    def _read(self, wait: float) -> list[Event]:
        message = self._pubsub.get_message(timeout=wait)
        if message is None:
            return []
        data = message["data"] if message["type"] == "message" else None
        return [Event(message["channel"].decode(), data)]


class _AsyncMailbox(_Mailbox):
    async def get(self, seconds: float) -> list[Event]:  # type: ignore[override]
        async def read(wait: float) -> list[Event]:
            if not (found := self._read(0.0)):
                await asyncio.sleep(wait)
            return found

        return await _wait_async(read, seconds, self._stepper)


def _wait(read: Callable[[float], list[Event]], seconds: float, stepper: Stepper) -> list[Event]:
    """The first result of `read(seconds to wait)` that is not empty, or the one at the deadline."""
    deadline = time.monotonic() + seconds
    while not (found := read(0.0)):
        pause = stepper.advance()
        if pause:
            left = deadline - time.monotonic()
            if left <= 0:
                return found
            if found := read(min(pause, left, POLL_SECONDS)):
                return found
    return found


async def _wait_async(
    read: Callable[[float], Awaitable[list[Event]]], seconds: float, stepper: Stepper
) -> list[Event]:
    """`_wait` for asyncio."""
    deadline = time.monotonic() + seconds
    while not (found := await read(0.0)):
        pause = stepper.advance()
        if pause:
            left = deadline - time.monotonic()
            if left <= 0:
                return found
            if found := await read(min(pause, left, POLL_SECONDS)):
                return found
    return found
