"""Conversations with Redis that are written once and held by threads and by asyncio alike.

A conversation is a generator. It yields a `Step` (what to do with the connection) and is sent the
reply, or has the Redis error thrown in; it yields `Emit(value)` to hand a value to the caller.
`drive` and `drive_async` are the only places that know how waiting is done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import redis
import redis.asyncio

from jobs.client.connection import redis_failure

T = TypeVar("T")

RECONNECT_SECONDS = 30.0  # how long a conversation goes on without Redis
PAUSE_SECONDS = 0.2  # between two tries


class Emit(NamedTuple, Generic[T]):
    """A value for the caller."""

    value: T


class Line:
    """One conversation's way to Redis: commands through the pool, and a subscription of its own.

    What waits answers an awaitable with asyncio.
    """

    def __init__(self, client: redis.Redis | redis.asyncio.Redis) -> None:
        self.redis: Any = client
        self._pubsub: Any = None

    @property
    def pubsub(self) -> Any:
        if self._pubsub is None:
            self._pubsub = self.redis.pubsub()
        return self._pubsub

    def sleep(self, seconds: float) -> Any:
        if isinstance(self.redis, redis.asyncio.Redis):
            return asyncio.sleep(seconds)
        return time.sleep(seconds)

    def hang_up(self) -> Any:
        """Close the subscription, if there is one."""
        pubsub, self._pubsub = self._pubsub, None
        if isinstance(self.redis, redis.asyncio.Redis):
            return pubsub.aclose() if pubsub else asyncio.sleep(0)
        return pubsub.close() if pubsub else None


Step = Callable[[Line], Any]
Steps = Generator[Step | Emit[T], Any, None]  # a conversation that hands out values of type T
Ask = Generator[Step | Emit[Any], Any, T]  # a part of one, that answers a T


def command(name: str, *args: Any, **options: Any) -> Step:
    """The step that runs one Redis command."""
    return lambda line: getattr(line.redis, name)(*args, **options)


def reliably(step: Step, deadline: float | None = None) -> Ask[Any]:
    """The reply to `step`, tried again while Redis can't be reached.

    Gives up with the Redis error RECONNECT_SECONDS after the first failure, or at `deadline`
    (of time.monotonic). Only for steps that may run twice.
    """
    give_up: float | None = None
    while True:
        try:
            return (yield step)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            now = time.monotonic()
            give_up = give_up or now + RECONNECT_SECONDS
            hopeless = isinstance(error, redis.AuthenticationError)
            if hopeless or now > min(give_up, deadline or give_up):
                raise
        yield lambda line: line.sleep(PAUSE_SECONDS)


def drive(steps: Steps[T], client: redis.Redis) -> Iterator[T]:
    """Hold a conversation; iterates over what it emits. Redis errors end it as a JobError."""
    line = Line(client)
    reply: Any = None
    failure: redis.RedisError | None = None
    try:
        while True:
            try:
                item = steps.send(reply) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            reply = failure = None
            if isinstance(item, Emit):
                yield item.value
                continue
            try:
                reply = item(line)
            except redis.RedisError as error:
                failure = error
    except redis.RedisError as error:
        raise redis_failure(client, error) from error
    finally:
        steps.close()
        line.hang_up()


def answer(steps: Steps[T], client: redis.Redis) -> T:
    """The one value that a conversation emits."""
    (value,) = drive(steps, client)
    return value


async def drive_async(steps: Steps[T], client: redis.asyncio.Redis) -> AsyncIterator[T]:
    """The same with asyncio."""
    line = Line(client)
    reply: Any = None
    failure: redis.RedisError | None = None
    try:
        while True:
            try:
                item = steps.send(reply) if failure is None else steps.throw(failure)
            except StopIteration:
                return
            reply = failure = None
            if isinstance(item, Emit):
                yield item.value
                continue
            try:
                reply = await item(line)
            except redis.RedisError as error:
                failure = error
    except redis.RedisError as error:
        raise redis_failure(client, error) from error
    finally:
        steps.close()
        await line.hang_up()


async def answer_async(steps: Steps[T], client: redis.asyncio.Redis) -> T:
    """The same with asyncio."""
    (value,) = [value async for value in drive_async(steps, client)]
    return value
