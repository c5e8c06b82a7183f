"""Connecting to Redis: the URL, a client with timeouts, and Redis errors as JobError."""

from __future__ import annotations

import os
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


def redis_url(url: str | None = None) -> str:
    """`url`, else $CHATJOBS_REDIS_URL, else the local default."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def connect(url: str | None = None) -> redis.Redis:
    """A client for `url` (redis://, rediss://, unix://). Connects on the first command.

    Raises InvalidRequest for an invalid URL.
    """
    retry = Retry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        return redis.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None


def connect_async(url: str | None = None) -> redis.asyncio.Redis:
    """`connect` for asyncio."""
    retry = AsyncRetry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        return redis.asyncio.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None


def redis_failure(client: Any, error: redis.RedisError) -> JobError:
    """A Redis error as a JobError that names the server, but never the password."""
    options = client.connection_pool.connection_kwargs
    server = (
        options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    )
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if isinstance(error, redis.AuthenticationError):
        return JobError("internal", f"Redis at {server} refused the login: {reason}")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return JobError("internal", f"can't reach Redis at {server}: {reason}")
    return JobError("internal", f"Redis at {server} refused a command: {reason}")


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
