"""The connections of redis-py, sync and async, and its pipeline, for servers that fail over.

A server that refuses writes because it is a replica (now) is left: the connection is closed, and
the error is a ConnectionError, so that the command is sent again on a new connection, which
resolves the address again. The other connections of the process to this address are left before
their next command: on a replica, a read would not see what has been written to the new primary. An
error about the values in keys is a Damaged. A pipeline that reaches a server without its scripts
loads them. And the socket's timeout begins when a blocking command has waited its own time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hiredis
import redis
from redis import asyncio, connection, sentinel
from redis.asyncio import connection as async_connection
from redis.asyncio import sentinel as async_sentinel
from redis.client import Pipeline
from redis.exceptions import MasterDownError, NoScriptError, ReadOnlyError
from redis.sentinel import MasterNotFoundError
from redis.utils import SENTINEL as NOT_GIVEN

from jobs.store.damage import classified


class _Packer(connection.HiredisRespSerializer):
    """redis-py's packer looks at the type of each word, which takes longer than to pack it."""

    def pack(self, *words: Any) -> list[bytes]:
        if words[0] == "EVALSHA":  # no words but str, bytes and numbers, and the most by far
            return [hiredis.pack_command(words)]
        packed: list[bytes] = super().pack(*words)
        return packed


class _Parser(connection.DefaultParser):  # type: ignore[misc, valid-type]
    """Makes the exceptions of error replies, also of those inside the reply of a script."""

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        return classified(super().parse_error(response))

    def handle_pubsub_push_response(self, response: Any) -> Any:
        """A message of a channel. redis-py's own writes each one to a log, formatted in any case,
        which takes a fifth of the time that a stream of small messages takes."""
        return response


class _AsyncParser(async_connection.DefaultParser):  # type: ignore[misc, valid-type]
    """`_Parser` for asyncio."""

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        return classified(super().parse_error(response))

    async def handle_pubsub_push_response(self, response: Any) -> Any:
        return response


_demotions: Counter[Any] = Counter()  # demoted servers that this process has met, by address


class _Leaving:
    """Knows whether a demoted server was met at its address since the connection was made."""

    is_connected: bool
    _known = 0  # demotions at the address when the connection was made

    def _address(self) -> Any:
        return getattr(self, "path", None) or (self.host, self.port)  # type: ignore[attr-defined]

    def _note_connecting(self) -> None:
        if not self.is_connected:
            self._known = _demotions[self._address()]

    def _note_demoted(self) -> None:
        _demotions[self._address()] += 1

    def _must_leave(self) -> bool:
        return self.is_connected and self._known != _demotions[self._address()]


class _Sync(_Leaving):
    """For subclasses of redis.connection.Connection."""

    socket_timeout: float | None
    _waits = 0.0  # seconds that the last command may block

    def connect_check_health(self, *words: Any, **options: Any) -> None:
        self._note_connecting()
        super().connect_check_health(*words, **options)  # type: ignore[misc]

    def send_packed_command(self, *words: Any, **options: Any) -> None:
        if self._must_leave():
            self.disconnect()  # type: ignore[attr-defined]
        super().send_packed_command(*words, **options)  # type: ignore[misc]

    def _construct_command_packer(self, packer: Any) -> Any:
        return _Packer()

    def set_parser(self, parser_class: Any) -> None:
        super().set_parser(_Parser)  # type: ignore[misc]

    def send_command(self, *words: Any, **options: Any) -> None:
        self._waits = waiting_time(words)
        super().send_command(*words, **options)  # type: ignore[misc]

    def read_response(
        self, disable_decoding: bool = False, *, timeout: Any = NOT_GIVEN, **options: Any
    ) -> Any:
        if timeout is NOT_GIVEN and self._waits and self.socket_timeout is not None:
            timeout = self.socket_timeout + self._waits
        self._waits = 0.0
        try:
            return super().read_response(disable_decoding, timeout=timeout, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if not is_demoted(error):
                raise without_secret(error, self) from None
            self._note_demoted()
            self.disconnect()  # type: ignore[attr-defined]
            raise Demoted from error


class _Async(_Leaving):
    """For subclasses of redis.asyncio.connection.AbstractConnection."""

    socket_timeout: float | None
    _waits = 0.0

    async def connect_check_health(self, *words: Any, **options: Any) -> None:
        self._note_connecting()
        await super().connect_check_health(*words, **options)  # type: ignore[misc]

    async def send_packed_command(self, *words: Any, **options: Any) -> None:
        if self._must_leave():
            await self.disconnect()  # type: ignore[attr-defined]
        await super().send_packed_command(*words, **options)  # type: ignore[misc]

    def set_parser(self, parser_class: Any) -> None:
        super().set_parser(_AsyncParser)  # type: ignore[misc]

    async def send_command(self, *words: Any, **options: Any) -> None:
        self._waits = waiting_time(words)
        await super().send_command(*words, **options)  # type: ignore[misc]

    async def read_response(
        self, disable_decoding: bool = False, timeout: float | None = None, **options: Any
    ) -> Any:
        if timeout is None and self._waits and self.socket_timeout is not None:
            timeout = self.socket_timeout + self._waits
        self._waits = 0.0
        try:
            return await super().read_response(disable_decoding, timeout, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if not is_demoted(error):
                raise without_secret(error, self) from None
            self._note_demoted()
            await self.disconnect()  # type: ignore[attr-defined]
            raise Demoted from error


class Demoted(redis.ConnectionError):
    """The server is not the primary (any more)."""

    def __init__(self) -> None:
        super().__init__("the server is a replica (now): it refuses writes")


def without_secret(error: redis.ResponseError, connection: Any) -> redis.ResponseError:
    """An error of the server that does not quote the password: a server that does not know the
    command with which a connection logs in repeats its words."""
    secret = getattr(connection, "password", None)
    if not secret or secret not in str(error):
        return error
    return type(error)(str(error).replace(secret, "***"))


def is_demoted(error: redis.ResponseError) -> bool:
    """True if the server said that it is not the primary."""
    if isinstance(error, ReadOnlyError | MasterDownError):
        return True
    return str(error).startswith(("UNBLOCKED", "WAIT cannot be used with replica"))


def waiting_time(words: tuple[Any, ...]) -> float:
    """The seconds that the server may wait before it replies to this command."""
    name = str(words[0]).upper()
    if name in ("XREAD", "XREADGROUP"):
        names = [str(word).upper() if isinstance(word, str | bytes) else "" for word in words[:8]]
        for place, word in enumerate(names):
            if word in ("BLOCK", "B'BLOCK'"):
                return float(words[place + 1]) / 1000
    if name in ("BLPOP", "BRPOP", "BLMOVE", "BZPOPMIN", "BZPOPMAX"):
        return float(words[-1])
    if name == "WAIT":
        return float(words[2]) / 1000
    return 0.0


class _Connection(_Sync, connection.Connection):
    pass


class _SSLConnection(_Sync, connection.SSLConnection):
    pass


class _UnixConnection(_Sync, connection.UnixDomainSocketConnection):
    pass


class _SentinelConnection(_Sync, sentinel.SentinelManagedConnection):
    def send_packed_command(self, *words: Any, **options: Any) -> None:
        if self._must_leave():
            self.disconnect()  # type: ignore[no-untyped-call]
        if not self.is_connected:
            # redis-py would connect to the last address, without asking Sentinel.
            self.connect()  # type: ignore[no-untyped-call]
        super().send_packed_command(*words, **options)


class _SentinelSSLConnection(_SentinelConnection, sentinel.SentinelManagedSSLConnection):
    pass


class _AsyncConnection(_Async, async_connection.Connection):
    pass


class _AsyncSSLConnection(_Async, async_connection.SSLConnection):
    pass


class _AsyncUnixConnection(_Async, async_connection.UnixDomainSocketConnection):
    pass


class _AsyncSentinelConnection(_Async, async_sentinel.SentinelManagedConnection):
    async def send_packed_command(self, *words: Any, **options: Any) -> None:
        if not self.is_connected:
            await self.connect()  # type: ignore[no-untyped-call]
        await super().send_packed_command(*words, **options)


class _AsyncSentinelSSLConnection(
    _AsyncSentinelConnection, async_sentinel.SentinelManagedSSLConnection
):
    pass


class _Pipeline(Pipeline):
    """Sends scripts by their digests, and loads them into a server that does not have them: also
    one that it is repeated on after a fail-over."""

    def load_scripts(self) -> None:
        """redis-py asks for the scripts once, maybe over another connection; here, the replies
        tell, and a transaction loads them first."""

    def _execute_transaction(self, connection: Any, *words: Any) -> Any:
        self._load(connection)
        return super()._execute_transaction(connection, *words)

    def _execute_pipeline(self, connection: Any, commands: Any, raise_on_error: bool) -> Any:
        run = super()._execute_pipeline
        replies = run(connection, commands, False)  # type: ignore[no-untyped-call]
        refused = [at for at, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if refused:
            self._load(connection)
            again = run(connection, [commands[at] for at in refused], False)  # type: ignore[no-untyped-call]
            for at, reply in zip(refused, again, strict=True):
                replies[at] = reply
        if raise_on_error:
            self.raise_first_error(commands, replies)  # type: ignore[no-untyped-call]
        return replies

    def _load(self, connection: Any) -> None:
        for script in self.scripts:
            connection.send_command("SCRIPT LOAD", script.script)
            connection.read_response()


class Client(redis.Redis):
    """A client whose pipelines survive a fail-over."""

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


SYNC: dict[str, type] = {
    "redis": _Connection,
    "rediss": _SSLConnection,
    "unix": _UnixConnection,
    "redis+sentinel": _SentinelConnection,
    "rediss+sentinel": _SentinelSSLConnection,
}
ASYNC: dict[str, type] = {
    "redis": _AsyncConnection,
    "rediss": _AsyncSSLConnection,
    "unix": _AsyncUnixConnection,
    "redis+sentinel": _AsyncSentinelConnection,
    "rediss+sentinel": _AsyncSentinelSSLConnection,
}


class _Sentinel(sentinel.Sentinel):
    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError:
            cause: redis.RedisError | None = None
            for one in self.sentinels:
                try:
                    one.ping()
                except redis.RedisError as error:
                    cause = error
                    break
            raise _no_primary(service_name, cause) from cause


class _AsyncSentinel(async_sentinel.Sentinel):
    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except MasterNotFoundError:
            cause: redis.RedisError | None = None
            for one in self.sentinels:
                try:
                    await one.ping()
                except redis.RedisError as error:
                    cause = error
                    break
            raise _no_primary(service_name, cause) from cause


def _no_primary(name: str, cause: redis.RedisError | None) -> MasterNotFoundError:
    """redis-py's own error quotes its clients with all their options, and no reason. `cause`: why
    the first Sentinel that does not reply does not."""
    detail = f" ({str(cause).rstrip('.')})" if cause is not None else ""
    return MasterNotFoundError(
        f"no Sentinel names a primary {name!r} that works{detail}: a fail-over goes on, or the "
        "name or the Sentinels in the URL are wrong"
    )


class SentinelPool(sentinel.SentinelConnectionPool):
    """Closes the connections to the Sentinels together with its own."""

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()


class AsyncSentinelPool(async_sentinel.SentinelConnectionPool):
    """`SentinelPool` for asyncio."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:
            await self.sentinel_manager.aclose()


def sentinel_client(
    hosts: list[tuple[str, int]], master: str, of_sentinels: dict[str, Any], **options: Any
) -> redis.Redis:
    """A client of the primary that these Sentinels name, now and after each fail-over."""
    manager = _Sentinel(hosts, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    client: redis.Redis = manager.master_for(  # type: ignore[no-untyped-call]
        master, redis_class=Client, connection_pool_class=SentinelPool, **options
    )
    return client


def async_sentinel_client(
    hosts: list[tuple[str, int]], master: str, of_sentinels: dict[str, Any], **options: Any
) -> asyncio.Redis:
    """`sentinel_client` for asyncio."""
    manager = _AsyncSentinel(hosts, sentinel_kwargs=of_sentinels)  # type: ignore[no-untyped-call]
    client: asyncio.Redis = manager.master_for(
        master, connection_pool_class=AsyncSentinelPool, **options
    )
    return client
