"""Connecting to Redis: the URL, a client with timeouts, and Redis errors as JobError."""

from __future__ import annotations

import os
import re
import ssl
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from jobs.errors import JobError, invalid

URL_VARIABLE = "CHATJOBS_REDIS_URL"
DEFAULT_URL = "redis://localhost:6379/0"

SOCKET_SECONDS = 10.0  # without a reply the connection is dead; longer than any blocking command
CONNECT_SECONDS = 5.0
RETRIES = 3  # of one command, within about a second; `jobs.client.steps.retry` goes on longer
MAX_CONNECTIONS = 10_000  # each waiting `result` and each followed stream uses one

_TLS_HINT = (
    "; name the authority of the server's certificate in the URL (?ssl_ca_certs=FILE), and use "
    "rediss:// only for a server that speaks TLS"
)


def redis_url(url: str | None = None) -> str:
    """`url`, else $CHATJOBS_REDIS_URL, else the local default."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def connect(url: str | None = None) -> redis.Redis:
    """A client for `url` (redis://, rediss://, unix://). Connects on the first command.

    Raises InvalidRequest for an invalid URL.
    """
    retry = Retry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        client = redis.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None
    _check_options(client.connection_pool)
    return client


def connect_async(url: str | None = None) -> redis.asyncio.Redis:
    """`connect` for asyncio."""
    retry = AsyncRetry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        client = redis.asyncio.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None
    _check_options(client.connection_pool)
    return client


def redis_failure(client: Any, error: redis.RedisError) -> JobError:
    """A Redis error as a JobError that names the server, but never the password."""
    options = client.connection_pool.connection_kwargs
    server = (
        options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    )
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if _cause(error, ssl.SSLError):
        return JobError("internal", f"TLS with Redis at {server} failed: {reason}{_TLS_HINT}")
    if isinstance(error, redis.AuthenticationError):
        return JobError("internal", f"Redis at {server} refused the login: {reason}")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return JobError("internal", f"can't reach Redis at {server}: {reason}")
    if "compiling script" in reason and "'#'" in reason:
        return JobError("internal", f"Redis at {server} is too old: chatjobs needs 7.0 or newer")
    return JobError("internal", f"Redis at {server} refused a command: {reason}")


def nothing_listens(client: Any, error: redis.RedisError) -> bool:
    """Whether no server has the port or the unix socket of the URL."""
    if "path" in client.connection_pool.connection_kwargs and _cause(error, FileNotFoundError):
        return True
    return _cause(error, ConnectionRefusedError)


def _cause(error: BaseException, kind: type[BaseException]) -> bool:
    """Whether an error of this kind led to `error`."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, kind):
        seen = seen.__cause__ or seen.__context__
    return seen is not None


def _check_options(pool: Any) -> None:
    """Raises InvalidRequest for an option in the URL that connections don't have."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            raise
        raise invalid(
            f"the Redis URL has an unknown option '{found[1]}': remove it (options follow the ?; "
            "those of TLS, ssl_…, need rediss://)",
            "url",
        ) from None


def _limits(url: str | None) -> dict[str, Any]:
    limits: dict[str, Any] = {
        "socket_timeout": SOCKET_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "max_connections": MAX_CONNECTIONS,
    }
    if not redis_url(url).startswith("unix:"):
        limits["socket_keepalive"] = True
    return limits


def _bad_url() -> JobError:
    # redis-py's own message may quote a part of the password.
    return invalid(
        "the Redis URL is invalid: the form is redis://[[user]:password@]host[:port][/db], "
        "rediss://… or unix:///path; escape special characters of a password as %XX",
        "url",
    )
