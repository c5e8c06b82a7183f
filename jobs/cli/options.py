"""Options shared by several commands, and the Redis connection they select."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Unavailable

if TYPE_CHECKING:
    from redis import Redis

    from jobs import Client

EMBEDDED = "embedded"

redis_option = click.option(
    "--redis",
    "redis_url",
    envvar="CHATJOBS_REDIS_URL",
    default="redis://localhost:6379/0",
    show_default=True,
    show_envvar=True,
    metavar="URL",
    help="Redis server; 'embedded' starts a private one that stops with the command.",
)
results_option = click.option(
    "--results",
    envvar="CHATJOBS_RESULTS",
    default="results",
    show_default="./results",
    show_envvar=True,
    metavar="DIR",
    help="Folder of the result data sets.",
)


def check_run(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check that `value` is a run id: it becomes a folder name."""
    from jobs.keys import RUN_ID

    if value is not None and not RUN_ID.fullmatch(value):
        raise click.BadParameter(
            f"{value!r}: a run id has up to 100 letters, digits, '_', '-' and '.', and does not "
            "start with '.'"
        )
    return value


class Seconds(click.FloatRange):
    """A number of seconds; NaN is rejected."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")


@contextmanager
def server(url: str) -> Iterator[str]:
    """Yield the URL of a reachable Redis; `embedded` starts a private one for the duration."""
    if url == EMBEDDED:
        from jobs import JobError

        (plugin,) = entry_points(group="chatjobs.servers", name=EMBEDDED)
        with ExitStack() as stack:
            try:
                embedded = stack.enter_context(plugin.load()())
            except JobError as error:  # no server binary found
                raise Unavailable(error.message) from None
            yield embedded.url
    else:
        _check(url)
        yield url


@contextmanager
def client(url: str) -> Iterator[Client]:
    """Yield a client of the Redis at `url`."""
    from jobs import Client

    with server(url) as reachable, Client(reachable) as connected:
        yield connected


@contextmanager
def connection(url: str) -> Iterator[Redis]:
    """Yield a plain connection to the Redis at `url`, for reading."""
    from jobs.client.connection import connect

    with server(url) as reachable, connect(reachable) as redis:
        yield redis


def _check(url: str) -> None:
    """Raise with a hint for the user if no Redis answers at `url`."""
    from redis import AuthenticationError, ConnectionError, RedisError, TimeoutError

    from jobs import JobError
    from jobs.client.connection import connect, redis_failure

    try:
        redis = connect(url)
    except JobError as error:
        raise click.BadParameter(error.message, param_hint="'--redis'") from None
    try:
        redis.ping()
    except RedisError as error:
        message = redis_failure(redis, error).message
        unreachable = isinstance(error, ConnectionError | TimeoutError)
        if unreachable and not isinstance(error, AuthenticationError):
            message += (
                "; start Redis (redis-server --appendonly yes, or: docker compose up -d redis) "
                "or select another server with --redis URL"
            )
        raise Unavailable(message) from None
    finally:
        redis.close()
