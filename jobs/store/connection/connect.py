"""Connecting to Redis: a URL → a client with timeouts; Redis errors → JobError."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.connection import SSLConnection
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError

from jobs.errors import JobError, invalid
from jobs.store.connection import transport
from jobs.store.connection.sentinel import SentinelURL
from jobs.store.connection.url import NO_CLUSTER, bad_url, check_url
from jobs.store.damage import Busy, Damaged, Unwritable

URL_VARIABLE = "CHATJOBS_REDIS_URL"
DEFAULT_URL = "redis://localhost:6379/0"

# Without a reply for so long a command fails, and is not sent again: a server that hangs would keep
# the next one waiting as long. Blocking commands have their own time in addition.
SOCKET_SECONDS = 10.0
CONNECT_SECONDS = 5.0
# Of one command whose connection is lost, within about a second; `retry` of protocol.py goes on
# longer, also after a command without a reply.
RETRIES = 3
LOST = (redis.ConnectionError,)
MAX_CONNECTIONS = 10_000  # each waiting `result` and each followed stream uses one

WRONG_TYPE = "; another program has written a key of chatjobs, which chatjobs status may name"
SENTINEL_SECONDS = 2.0  # without a reply, the next Sentinel is asked

MIN_VERSION = 7  # of Redis: older ones do not read the flags of scripts; Valkey says 7.2
TOO_OLD = "Redis at {} is too old{}: chatjobs needs Redis 7.0 or newer, or Valkey"

_TLS_HINT = (
    "; name the authority of the server's certificate in the URL (?ssl_ca_certs=FILE), and use "
    "rediss:// only for a server that speaks TLS"
)
_NO_TLS = "; the server does not speak TLS at this port: write redis:// (redis+sentinel://)"
_WRONG_TIME = "; replace the server's certificate, or set the clock of this machine"
_WRONG_HOST = "; name the host in the URL as the server's certificate does"
_NO_CERTIFICATE = (
    "; the server asks for a certificate: give one in the URL (?ssl_certfile=FILE&ssl_keyfile=FILE)"
    ", or set tls-auth-clients no in redis.conf"
)
_NO_PAIR = "; ssl_certfile and ssl_keyfile in the URL must name a certificate and its key, in PEM"
_NO_PEM = "; ssl_ca_certs in the URL must name a file with certificates in PEM"
_TLS_HINTS = {  # by what OpenSSL says
    "WRONG_VERSION_NUMBER": _NO_TLS,
    "wrong version number": _NO_TLS,
    "record layer failure": _NO_TLS,
    "certificate has expired": _WRONG_TIME,
    "certificate is not yet valid": _WRONG_TIME,
    "Hostname mismatch": _WRONG_HOST,
    "IP address mismatch": _WRONG_HOST,
    "certificate required": _NO_CERTIFICATE,
    "key values mismatch": _NO_PAIR,
    "PEM lib": _NO_PAIR,
    "no certificate or crl found": _NO_PEM,
    "no start line": _NO_PEM,
}
_TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
MAYBE_NO_TLS = "; if this port does not speak TLS, write redis:// (redis+sentinel://)"
_MAYBE_TLS = "; if this port speaks TLS, write rediss:// (rediss+sentinel://)"
_SIGNS_OF_TLS = ("Connection closed by server", "Connection reset by peer")
_MAYBE_FAILOVER = "; Sentinel names another primary soon, if there is a replica"
_LOGIN_HINT = "; check the user and the password in the URL"
_PIPELINE = re.compile(r"^Command # \d+ \(.*?\) of pipeline caused error: ")  # before the reason
_PROTECTED = (
    "is in protected mode and refuses other machines, since its user default needs no password: "
    "docs/operations/many-boxes.md has the settings for other machines"
)
_FEW_REPLICAS = "connect as many replicas as its min-replicas-to-write says"
_CANT_SAVE = "make its disk writable, such as by freeing room there"
_BLOCKED = (
    "; wait for the script of another program, or end it (redis-cli SCRIPT KILL) if it has not "
    "written yet"
)
_NO_LOGIN = "; give the user and the password in the URL: redis://user:password@host:port/db"


def redis_url(url: str | None = None) -> str:
    """`url`, else $CHATJOBS_REDIS_URL, else the local default."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def connect(url: str | None = None) -> redis.Redis:
    """A client for `url`: redis://, rediss://, unix://, or {redis,rediss}+sentinel://, whose form
    `SentinelURL` describes. Connects on the first command.

    Raises InvalidRequest for an invalid URL.
    """
    url = redis_url(url)
    check_url(url)
    scheme = url.partition(":")[0]
    options = _limits(scheme)
    options["retry"] = Retry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES, LOST)
    options["connection_class"] = transport.SYNC.get(scheme)
    try:
        if (parsed := SentinelURL.parse(url)) is not None:
            sentinels = _sentinel_options(parsed, Retry(NoBackoff(), 0))
            client = transport.sentinel_client(
                parsed.sentinels, parsed.master, sentinels, **{**options, **parsed.options}
            )
        else:
            client = transport.Client.from_url(url, **options)
    except ValueError:
        raise bad_url(url) from None
    _check_options(client.connection_pool)
    return client


def connect_async(url: str | None = None) -> redis.asyncio.Redis:
    """`connect` for asyncio."""
    url = redis_url(url)
    check_url(url)
    scheme = url.partition(":")[0]
    options = _limits(scheme)
    options["retry"] = AsyncRetry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES, LOST)
    options["connection_class"] = transport.ASYNC.get(scheme)
    try:
        if (parsed := SentinelURL.parse(url)) is not None:
            sentinels = _sentinel_options(parsed, AsyncRetry(NoBackoff(), 0))
            client = transport.async_sentinel_client(
                parsed.sentinels, parsed.master, sentinels, **{**options, **parsed.options}
            )
        else:
            client = redis.asyncio.Redis.from_url(url, **options)
            client.connection_pool.connection_class = transport.ASYNC[scheme]
    except ValueError:
        raise bad_url(url) from None
    _check_options(client.connection_pool)
    return client


def limit_waits(client: redis.Redis, seconds: float) -> None:
    """Let the commands of `client` fail after `seconds` without a reply, and try none again."""
    client.set_retry(Retry(NoBackoff(), 0))
    options = client.connection_pool.connection_kwargs
    for name in ("socket_timeout", "socket_connect_timeout"):
        options[name] = min(options[name], seconds)


def redis_failure(client: Any, error: redis.RedisError) -> JobError:
    """A Redis error as a JobError that names the server, but never the password."""
    server = server_name(client)
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    reason = _PIPELINE.sub("", reason)
    if uses_tls(client) and (fault := _unreadable_file(client)):
        return JobError("unavailable", f"TLS with Redis at {server} failed: {fault}")
    if _cause(error, ssl.SSLError):
        hints = (hint for sign, hint in _TLS_HINTS.items() if sign in reason)
        hint = next(hints, _TLS_HINT)
        return JobError("unavailable", f"TLS with Redis at {server} failed: {reason}{hint}")
    if isinstance(error, redis.AuthenticationError):
        hint = (
            _LOGIN_HINT if client.connection_pool.connection_kwargs.get("password") else _NO_LOGIN
        )
        return JobError("unavailable", f"Redis at {server} refused the login: {reason}{hint}")
    if isinstance(error, NoPermissionError):
        return JobError(
            "unavailable",
            f"Redis at {server} refused a command: {reason}; the user {user_name(client)!r} lacks "
            "a right: docs/operations.md (Users) lists those of workers, operators and producers",
        )
    if reason.startswith("DENIED"):
        return JobError("unavailable", f"Redis at {server} {_PROTECTED}")
    if _cause(error, socket.gaierror):
        reason = "the name of the host can't be resolved: check it in the Redis URL"
        return JobError("unavailable", f"can't reach Redis at {server}: {reason}")
    if isinstance(error, Busy):
        return JobError("unavailable", f"Redis at {server} is blocked: {reason}{_BLOCKED}")
    if isinstance(error, redis.InvalidResponse) or any(sign in reason for sign in _SIGNS_OF_TLS):
        hint = "" if uses_tls(client) else _MAYBE_TLS
        return JobError("unavailable", f"can't talk with Redis at {server}: {reason}{hint}")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        hint = MAYBE_NO_TLS if isinstance(error, redis.TimeoutError) and uses_tls(client) else ""
        refused = _cause(error, ConnectionRefusedError)
        if refused and _is_named_by_sentinel(client) and not isinstance(error, MasterNotFoundError):
            hint = _MAYBE_FAILOVER
        return JobError("unavailable", f"can't reach Redis at {server}: {reason}{hint}")
    if isinstance(error, AskError | ClusterDownError | ClusterCrossSlotError):
        return JobError("internal", NO_CLUSTER.format(server))
    if isinstance(error, OutOfMemoryError):
        return JobError(
            "queue_full",
            f"Redis at {server} is full: try again when jobs have ended and their results have "
            "expired, or raise maxmemory",
        )
    if isinstance(error, Unwritable):
        remedy = _FEW_REPLICAS if reason.startswith("NOREPLICAS") else _CANT_SAVE
        text = f"Redis at {server} takes no writes for now: {reason}; {remedy}"
        return JobError("unavailable", text)
    if "DB index is out of range" in reason:
        number = client.connection_pool.connection_kwargs.get("db")
        return JobError(
            "unavailable",
            f"Redis at {server} has no database {number}: name another one at the end of the URL, "
            "such as /0",
        )
    if "compiling script" in reason and "'#'" in reason:
        return JobError("internal", TOO_OLD.format(server, ""))
    if isinstance(error, Damaged) and error.found:
        return JobError("internal", str(error.found[0]))
    hint = WRONG_TYPE if "WRONGTYPE" in reason else ""
    return JobError("internal", f"Redis at {server} refused a command: {reason}{hint}")


def may_pass(error: redis.RedisError) -> bool:
    """True if the same call may work later, with no change by its caller: Redis is away, full, or
    takes no writes for now."""
    if isinstance(error, redis.AuthenticationError):
        return False
    passing = redis.ConnectionError | redis.TimeoutError | OutOfMemoryError | Unwritable
    return isinstance(error, passing)


def check_server(client: redis.Redis) -> None:
    """Raise JobError if the server is older than MIN_VERSION, or a node of a Redis Cluster."""
    server = client.info("server")
    version = str(server.get("redis_version", ""))
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < MIN_VERSION:
        raise JobError("internal", TOO_OLD.format(server_name(client), f" ({version})"))
    if server.get("redis_mode") == "cluster":
        raise JobError("internal", NO_CLUSTER.format(server_name(client)))


def server_name(client: Any) -> str:
    """The server for messages: its address or socket, or what Sentinel calls it."""
    pool = client.connection_pool
    options = pool.connection_kwargs
    if _is_named_by_sentinel(client):
        return f"Sentinel's {pool.service_name!r}"
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def _is_named_by_sentinel(client: Any) -> bool:
    return hasattr(client.connection_pool, "service_name")


def user_name(client: Any) -> str:
    """The Redis user of a client's connections."""
    return client.connection_pool.connection_kwargs.get("username") or "default"


def uses_tls(client: Any) -> bool:
    """True if the connections of a client use TLS."""
    return issubclass(client.connection_pool.connection_class, SSLConnection | AsyncSSLConnection)


def nothing_listens(client: Any, error: redis.RedisError) -> bool:
    """True if no server has the port or the unix socket of the URL."""
    if _is_named_by_sentinel(client):
        return False
    if "path" in client.connection_pool.connection_kwargs and _cause(error, FileNotFoundError):
        return True
    return _cause(error, ConnectionRefusedError)


def _unreadable_file(client: Any) -> str | None:
    """The fault of a file that the URL names for TLS and that can't be read: the errors of ssl do
    not name it."""
    options = client.connection_pool.connection_kwargs
    for name in _TLS_FILES:
        if path := options.get(name):
            try:
                Path(path).open("rb").close()
            except OSError as error:
                return f"can't read {path}, which {name} in the URL names: {error.strerror}"
    return None


def _cause(error: BaseException, kind: type[BaseException]) -> bool:
    """True if an error of this kind led to `error`."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, kind):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _check_options(pool: Any) -> None:
    """Raises InvalidRequest for an option that connections of this kind don't have."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            raise
        raise invalid(
            f"the Redis URL has the option '{found[1]}', which its connections don't have: remove "
            "it",
            "url",
        ) from None


def _limits(scheme: str) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "max_connections": MAX_CONNECTIONS,
    }
    if scheme != "unix":
        limits["socket_keepalive"] = True
    return limits


def _sentinel_options(url: SentinelURL, retry: Any) -> dict[str, Any]:
    """Options of the connections to the Sentinels; TLS as for the servers."""
    timeouts = {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
    tls = {name: value for name, value in url.options.items() if name.startswith("ssl_")}
    return {**timeouts, **tls, **url.of_sentinels, "ssl": url.tls, "retry": retry}
