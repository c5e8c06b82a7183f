"""Redis protocols shared by the sync and async clients.

An exchange is a generator ("steps"). It yields a `Call`, a function of the connection, and is sent
the reply, or has the Redis error thrown in. With `Emit(value)` it hands a value to the caller at
once. `run_sync` and `run_async` return what steps return; `iterate_sync` and `iterate_async`
iterate over what they emit. Only these four know whether waiting blocks or awaits.
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

RECONNECT_SECONDS = 30.0  # how long `retry` tries while Redis can't be reached
PAUSE_SECONDS = 0.2  # between two tries


class Emit(NamedTuple, Generic[T]):
    """A value for the caller."""

    value: T


class Connection:
    """Context of one exchange: a Redis client and its own pub/sub subscription.

    With an asyncio client, whatever waits returns an awaitable.
    """

    def __init__(self, client: redis.Redis | redis.asyncio.Redis) -> None:
        self.redis: Any = client
        self._pubsub: Any = None

    @property
    def pubsub(self) -> Any:
        """The subscription, opened on first use."""
        if self._pubsub is None:
            self._pubsub = self.redis.pubsub()
        return self._pubsub

    def sleep(self, seconds: float) -> Any:
        if isinstance(self.redis, redis.asyncio.Redis):
            return asyncio.sleep(seconds)
        return time.sleep(seconds)

    def close_pubsub(self) -> Any:
        """Close the subscription, if there is one."""
        pubsub, self._pubsub = self._pubsub, None
        if isinstance(self.redis, redis.asyncio.Redis):
            return pubsub.aclose() if pubsub else asyncio.sleep(0)
        return pubsub.close() if pubsub else None


Call = Callable[[Connection], Any]
Steps = Generator[Call | Emit[Any], Any, T]  # returns a T
Emitting = Generator[Call | Emit[T], Any, None]  # emits values of type T


def command(name: str, *args: Any, **options: Any) -> Call:
    """The call of one Redis command."""
    return lambda connection: getattr(connection.redis, name)(*args, **options)


def retry(call: Call, deadline: float | None = None) -> Steps[Any]:
    """The reply to `call`, tried again while Redis can't be reached.

    Raises the Redis error RECONNECT_SECONDS after the first failure, or at `deadline` (of
    time.monotonic). Only for calls that may run twice.
    """
    give_up: float | None = None
    while True:
        try:
            return (yield call)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            now = time.monotonic()
            give_up = give_up or now + RECONNECT_SECONDS
            hopeless = isinstance(error, redis.AuthenticationError)
            if hopeless or now > min(give_up, deadline or give_up):
                raise
        yield lambda connection: connection.sleep(PAUSE_SECONDS)


def run_sync(steps: Steps[T], client: redis.Redis) -> T:
    """What the steps return. A Redis error ends them as a JobError."""
    (value,) = iterate_sync(_emit_returned(steps), client)
    return value


def iterate_sync(steps: Emitting[T], client: redis.Redis) -> Iterator[T]:
    """What the steps emit. A Redis error ends them as a JobError."""
    connection = Connection(client)
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
                reply = item(connection)
            except redis.RedisError as error:
                failure = error
    except redis.RedisError as error:
        raise redis_failure(client, error) from error
    finally:
        steps.close()
        connection.close_pubsub()


async def run_async(steps: Steps[T], client: redis.asyncio.Redis) -> T:
    """`run_sync` for asyncio."""
    (value,) = [value async for value in iterate_async(_emit_returned(steps), client)]
    return value


async def iterate_async(steps: Emitting[T], client: redis.asyncio.Redis) -> AsyncIterator[T]:
    """`iterate_sync` for asyncio."""
    connection = Connection(client)
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
                reply = await item(connection)
            except redis.RedisError as error:
                failure = error
    except redis.RedisError as error:
        raise redis_failure(client, error) from error
    finally:
        steps.close()
        await connection.close_pubsub()


def _emit_returned(steps: Steps[T]) -> Emitting[T]:
    yield Emit((yield from steps))
