"""How `jobs` reaches Redis: the URL, a client with sane limits, and what is said when it fails."""

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

SOCKET_SECONDS = 10.0  # no answer for so long means a dead connection; more than any wait of ours
CONNECT_SECONDS = 5.0
RETRIES = 3  # of one command, within about a second; `jobs.client.steps` goes on from there
MAX_CONNECTIONS = 10_000  # each waiting result and each followed stream holds one


def redis_url(url: str | None = None) -> str:
    """`url`, else $CHATJOBS_REDIS_URL, else the local default."""
    return url or os.environ.get(URL_VARIABLE) or DEFAULT_URL


def connect(url: str | None = None) -> redis.Redis:
    """A client for `url` (redis://, rediss://, unix://). Connects with the first command.

    Raises InvalidRequest for something that isn't a Redis URL.
    """
    retry = Retry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        return redis.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None


def connect_async(url: str | None = None) -> redis.asyncio.Redis:
    """The same for asyncio."""
    retry = AsyncRetry(ExponentialBackoff(cap=0.4, base=0.05), RETRIES)
    try:
        return redis.asyncio.Redis.from_url(redis_url(url), retry=retry, **_limits(url))
    except ValueError:
        raise _bad_url() from None


def redis_failure(client: Any, error: redis.RedisError) -> JobError:
    """What went wrong with Redis, in one sentence that names the place, never the password."""
    options = client.connection_pool.connection_kwargs
    place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, redis.AuthenticationError):
        return JobError("internal", f"Redis at {place} refused the login: {reason}")
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return JobError("internal", f"can't reach Redis at {place}: {reason}")
    return JobError("internal", f"Redis at {place} refused a command: {reason}")


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
    # The library's own words may quote a piece of the password.
    return invalid(
        "the Redis URL can't be read: it has the form redis://[[user]:password@]host[:port][/db], "
        "rediss://… or unix:///path; a special character in a password is written as %XX",
        "url",
    )
