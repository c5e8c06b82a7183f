"""Redis protocols shared by the sync and async clients.

An exchange is a generator ("steps"). It yields a `Call`, a function of the connection, and is sent
the reply, or has the Redis error thrown in. With `Emit(value)` it hands a value to the caller at
once. `run_sync` and `run_async` return what steps return; `iterate_sync` and `iterate_async`
iterate over what they emit. Only these four, and the `Connection` that they are given, know
whether waiting blocks or awaits.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import redis

from jobs.errors import JobError
from jobs.store.connection.connect import redis_failure
from jobs.store.connection.live import Mailbox
from jobs.store.damage import Damage, Damaged, type_of, typed_wrongly

T = TypeVar("T")
U = TypeVar("U")

RECONNECT_SECONDS = 30.0  # how long `retry` tries while Redis can't be reached, or does not reply
PAUSE_SECONDS = 0.2  # between two tries
READS_PER_SECOND = 1000  # of the states of jobs of which no message comes, in one client


class Emit(NamedTuple, Generic[T]):
    """A value for the caller."""

    value: T


Command: TypeAlias = Sequence[Any]  # name of a method of a Redis client, and its arguments


class Connection(Protocol):
    """The operations that steps ask for. With asyncio, those that wait return an awaitable."""

    redis: Any

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        """The reply to one command."""

    def run_many(self, commands: Sequence[Command]) -> Any:
        """The replies to some commands."""

    def listen(self, channels: Sequence[str], ends_only: bool) -> Mailbox:
        """A mailbox of these channels. Returns at once; `close` it."""

    def silence(self, seconds: float) -> float:
        """Seconds to wait for a message before Redis is read again."""

    def sleep(self, seconds: float) -> Any: ...


Call = Callable[[Connection], Any]
Steps = Generator[Call | Emit[Any], Any, T]  # returns a T
Emitting = Generator[Call | Emit[T], Any, None]  # emits values of type T


@dataclass(frozen=True, slots=True)
class CommandCall:
    """The call of one Redis command."""

    name: str
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def __call__(self, connection: Connection) -> Any:
        return connection.run(self.name, *self.args, **self.options)

    def words(self) -> Iterable[Any]:
        return self.args


@dataclass(frozen=True, slots=True)
class CommandsCall:
    """The call of some Redis commands in one round trip."""

    commands: Sequence[Command]

    def __call__(self, connection: Connection) -> Any:
        return connection.run_many(self.commands)

    def words(self) -> Iterable[Any]:
        return chain.from_iterable(self.commands)


def command(name: str, *args: Any, **options: Any) -> Call:
    """The call of one Redis command."""
    return CommandCall(name, args, options)


def commands(some: Sequence[Command]) -> Call:
    """The call of some Redis commands."""
    return CommandsCall(some)


def listen(channels: Sequence[str], *, ends_only: bool) -> Call:
    """The call that opens a mailbox, see `jobs.store.connection.live`."""
    return lambda connection: connection.listen(channels, ends_only)


def next_events(mailbox: Any, limit: float, silence: float) -> Call:
    """The call for the next events of a mailbox: an empty list after `limit` seconds, or about
    `silence` seconds, without one."""
    return lambda connection: mailbox.get(min(limit, connection.silence(silence)))


def sleep(seconds: float) -> Call:
    """The call that waits so long."""
    return lambda connection: connection.sleep(seconds)


def retry(call: Call, deadline: float | None = None) -> Steps[Any]:
    """The reply to `call`, tried again while Redis can't be reached, or does not reply.

    Raises the Redis error RECONNECT_SECONDS after the first try has begun, or at `deadline` (of
    time.monotonic). Only for calls that may run twice.
    """
    give_up = time.monotonic() + RECONNECT_SECONDS
    if deadline is not None:
        give_up = min(give_up, deadline)
    while True:
        try:
            return (yield call)
        except (redis.ConnectionError, redis.TimeoutError) as error:
            if isinstance(error, redis.AuthenticationError) or time.monotonic() > give_up:
                raise
        yield sleep(PAUSE_SECONDS)


def ping(deadline: float | None = None) -> Steps[Any]:
    """The reply of Redis; see `retry`."""
    return retry(command("ping"), deadline)


def collect(steps: Emitting[T], keep: Callable[[T], U]) -> Steps[list[U]]:
    """What `keep` makes of each value that steps emit."""
    kept: list[U] = []
    reply: Any = None
    failure: redis.RedisError | None = None
    while True:
        try:
            item = steps.send(reply) if failure is None else steps.throw(failure)
        except StopIteration:
            return kept
        reply = failure = None
        if isinstance(item, Emit):
            kept.append(keep(item.value))
            continue
        try:
            reply = yield item
        except redis.RedisError as error:
            failure = error


def read_damage(
    error: Damaged, names: Sequence[str], deadline: float | None = None
) -> Steps[list[Damage]]:
    """`damage_of` as steps: the keys that made a command fail."""
    if error.found:
        return error.found
    kinds = yield from retry(commands([("type", name) for name in names]), deadline)
    return typed_wrongly(dict(zip(names, kinds, strict=True)))


def run_sync(steps: Steps[T], connection: Connection) -> T:
    """Run the steps and return their value. A Redis error becomes a JobError."""
    (value,) = iterate_sync(_emit_returned(steps), connection)
    return value


def iterate_sync(steps: Emitting[T], connection: Connection) -> Iterator[T]:
    """Run the steps and yield the values that they emit. A Redis error becomes a JobError."""
    reply: Any = None
    failure: redis.RedisError | None = None
    failed: Call | None = None
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
                failure, failed = error, item
    except redis.RedisError as error:
        kinds: Any = []
        if names := _suspects(failed, error):
            with suppress(redis.RedisError):
                kinds = connection.run_many([("type", name) for name in names])
        raise _failure(connection, error, names, kinds) from error
    finally:
        steps.close()


async def run_async(steps: Steps[T], connection: Connection) -> T:
    """`run_sync` for asyncio."""
    (value,) = [value async for value in iterate_async(_emit_returned(steps), connection)]
    return value


async def iterate_async(steps: Emitting[T], connection: Connection) -> AsyncIterator[T]:
    """`iterate_sync` for asyncio."""
    reply: Any = None
    failure: redis.RedisError | None = None
    failed: Call | None = None
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
                if inspect.isawaitable(reply):
                    reply = await reply
            except redis.RedisError as error:
                failure, failed = error, item
    except redis.RedisError as error:
        kinds: Any = []
        if names := _suspects(failed, error):
            with suppress(redis.RedisError):
                kinds = await connection.run_many([("type", name) for name in names])
        raise _failure(connection, error, names, kinds) from error
    finally:
        steps.close()


class Commands:
    """Runs steps that only run commands, on a plain client. Redis errors are raised as they are."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def run(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self._client, name)(*args, **options)

    def run_steps(self, steps: Steps[T]) -> T:
        """Run the steps and return their value."""
        connection: Any = self  # has all that they ask for
        reply: Any = None
        while True:
            try:
                call: Any = steps.send(reply)
            except StopIteration as end:
                value: T = end.value
                return value
            reply = call(connection)


def _suspects(failed: Call | None, error: redis.RedisError) -> list[str]:
    """The keys of the failed call, if another program may have written one of them."""
    if not isinstance(error, Damaged) or not isinstance(failed, CommandCall | CommandsCall):
        return []
    return [word for word in failed.words() if isinstance(word, str) and type_of(word)]


def _failure(
    connection: Connection, error: redis.RedisError, names: Sequence[str], kinds: Sequence[bytes]
) -> JobError:
    """The error of steps that Redis has refused. `kinds`: the types of the keys `names`."""
    damaged = typed_wrongly(dict(zip(names, kinds, strict=False)))
    return (
        JobError("internal", str(damaged[0])) if damaged else redis_failure(connection.redis, error)
    )


def _emit_returned(steps: Steps[T]) -> Emitting[T]:
    yield Emit((yield from steps))
