"""Clients of an in-memory Redis that run the fake worker while they wait.

A command that would block first lets the worker advance, step by step, until there is a reply. So
no thread and no sleep is needed, and every run of a test takes the same steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import fakeredis
import redis.asyncio
import redis.client

from jobs import keys, lua
from jobs.client.aio import AsyncClient
from jobs.client.client import Client
from jobs.client.connection import DEFAULT_URL
from jobs.client.rq_format import CHANGING_FIELDS
from jobs.testing.stepper import Stepper

OUTBOX = keys.outbox("")  # a client reads the newest entry to wait until it is in Parquet
POLL_SECONDS = 0.05  # how long a command waits before it looks again for jobs of other threads


def connected_client(server: fakeredis.FakeServer, stepper: Stepper) -> Client:
    """A `Client` of the in-memory server."""
    client = Client(DEFAULT_URL)  # sends nothing until its connection is replaced
    client.redis = _Redis(stepper, server=server)
    return client


def connected_async_client(server: fakeredis.FakeServer, stepper: Stepper) -> AsyncClient:
    """An `AsyncClient` of the in-memory server."""
    return _AsyncClient(server, stepper)


class _AsyncClient(AsyncClient):
    def __init__(self, server: fakeredis.FakeServer, stepper: Stepper) -> None:
        super().__init__(DEFAULT_URL)
        self._producer = connected_client(server, stepper)
        self.redis = _AsyncRedis(stepper, server=server)


class ScriptingRedis(fakeredis.FakeRedis):
    """Runs scripts without their line of flags, which fakeredis does not know."""

    def register_script(self, script: Any) -> Any:
        return super().register_script(lua.split_flags(script)[1])

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        return super().eval(lua.split_flags(script)[1], numkeys, *keys_and_args)


class _Redis(ScriptingRedis):
    def __init__(self, stepper: Stepper, **options: Any) -> None:
        super().__init__(**options)
        self._stepper = stepper

    def hmget(self, name: Any, keys: Any, *args: Any) -> Any:
        reply = super().hmget(name, keys, *args)
        if tuple(keys) == CHANGING_FIELDS:
            self._stepper.poll(name)
        return reply

    def xrevrange(self, name: Any, *args: Any, **options: Any) -> Any:
        if name.startswith(OUTBOX):
            self._stepper.record()
        return super().xrevrange(name, *args, **options)

    def xread(  # type: ignore[override]  # without the newer parameters
        self, streams: Any, count: int | None = None, block: int | None = None
    ) -> Any:
        read = super().xread
        if block is None:
            return read(streams, count)
        return _wait(
            lambda wait: read(streams, count, _milliseconds(wait)),
            block / 1000 or math.inf,
            self._stepper,
        )

    def pubsub(self, **options: Any) -> redis.client.PubSub:
        return _PubSub(self._stepper, self.connection_pool, **options)


class _PubSub(redis.client.PubSub):
    def __init__(self, stepper: Stepper, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper = stepper

    def get_message(
        self, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0
    ) -> Any:
        read = super().get_message
        return _wait(
            lambda wait: read(ignore_subscribe_messages, wait),
            math.inf if timeout is None else timeout,
            self._stepper,
        )


class _AsyncRedis(fakeredis.FakeAsyncRedis):
    def __init__(self, stepper: Stepper, **options: Any) -> None:
        super().__init__(**options)
        self._stepper = stepper

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        return super().eval(lua.split_flags(script)[1], numkeys, *keys_and_args)

    async def hmget(self, name: Any, keys: Any, *args: Any) -> Any:
        reply = await super().hmget(name, keys, *args)
        if tuple(keys) == CHANGING_FIELDS:
            self._stepper.poll(name)
        return reply

    async def xrevrange(self, name: Any, *args: Any, **options: Any) -> Any:
        if name.startswith(OUTBOX):
            self._stepper.record()
        return await super().xrevrange(name, *args, **options)

    async def xread(  # type: ignore[override]
        self, streams: Any, count: int | None = None, block: int | None = None
    ) -> Any:
        read = super().xread
        if block is None:
            return await read(streams, count)
        return await _wait_async(
            lambda wait: read(streams, count, _milliseconds(wait)),
            block / 1000 or math.inf,
            self._stepper,
        )

    def pubsub(self, **options: Any) -> redis.asyncio.client.PubSub:
        return _AsyncPubSub(self._stepper, self.connection_pool, **options)


class _AsyncPubSub(redis.asyncio.client.PubSub):
    def __init__(self, stepper: Stepper, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._stepper = stepper

    async def get_message(
        self, ignore_subscribe_messages: bool = False, timeout: float | None = 0.0
    ) -> Any:
        read = super().get_message
        return await _wait_async(
            lambda wait: read(ignore_subscribe_messages, wait),
            math.inf if timeout is None else timeout,
            self._stepper,
        )


def _wait(read: Callable[[float], Any], seconds: float, stepper: Stepper) -> Any:
    """The first reply of `read(seconds to wait)` that is not empty, or the one at the deadline."""
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
    read: Callable[[float], Awaitable[Any]], seconds: float, stepper: Stepper
) -> Any:
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


def _milliseconds(wait: float) -> int | None:
    """The argument of XREAD: BLOCK 0 would wait for ever, None does not wait."""
    return max(1, round(wait * 1000)) if wait else None
