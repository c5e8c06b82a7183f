"""Options shared by several commands, and the Redis connection they select."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.decorators import FC

from jobs.cli.failures import Unavailable
from jobs.cli.interrupts import interrupts_raise
from jobs.cli.redis_watch import RedisWatch

if TYPE_CHECKING:
    from redis import Redis

    from jobs import Client

EMBEDDED = "embedded"
RESERVED_RUNS = frozenset({"show", "query", "compact", "rm"})  # subcommands of `results`
ANSWER_SECONDS = 3.5  # that a command waits for Redis: with its own start, 5 s


def is_embedded(url: str) -> bool:
    """True if `--redis` selects a private server."""
    return url == EMBEDDED or url.startswith(f"{EMBEDDED}:")


def _redis_source() -> str:
    """The option or the variable that selects the server, for errors."""
    ctx = click.get_current_context()
    if ctx.get_parameter_source("redis_url") is ParameterSource.ENVIRONMENT:
        return "$CHATJOBS_REDIS_URL"
    return "'--redis'"


def refuse_embedded(url: str) -> None:
    """Refuse a private server, for a command whose jobs other processes run."""
    if is_embedded(url):
        raise click.BadParameter(
            param_hint=_redis_source(),
            message="a private Redis would have no worker and end with this command: start "
            "chatjobs work --model M --redis embedded, and give the URL that it prints",
        )


def _check_redis(ctx: click.Context, param: click.Parameter, value: str) -> str:
    refuse_embedded(value)
    return value


def make_redis_option(
    help: str, callback: Callable[[click.Context, click.Parameter, str], str] | None = None
) -> Callable[[FC], FC]:
    """Return the option that selects the Redis server."""
    return click.option(
        "--redis",
        "redis_url",
        envvar="CHATJOBS_REDIS_URL",
        default="redis://localhost:6379/0",
        show_default=True,
        show_envvar=True,
        metavar="URL",
        callback=callback,
        help=help,
    )


redis_option = make_redis_option("Redis server.", _check_redis)


def make_results_option(help: str) -> Callable[[FC], FC]:
    """Return the option that selects the results folder."""
    return click.option(
        "--results",
        envvar="CHATJOBS_RESULTS",
        default="results",
        show_default="./results",
        show_envvar=True,
        metavar="DIR",
        help=help,
    )


results_option = make_results_option("Folder of the result data sets.")


def check_run(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Check that `value` can be the id of a new run: it becomes a folder name, and an argument of
    `chatjobs results`."""
    from jobs.keys import RUN_ID

    if value is not None and not RUN_ID.fullmatch(value):
        raise click.BadParameter(
            f"{value!r}: a run id has up to 100 letters, digits, '_', '-' and '.', and does not "
            "start with '.'"
        )
    if value in RESERVED_RUNS:
        raise click.BadParameter(f"{value!r} is a subcommand of chatjobs results: use another name")
    return value


class JobId(click.ParamType[str]):
    """The id of a job."""

    name = "job"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from jobs.keys import JOB_ID

        if not JOB_ID.fullmatch(value):
            self.fail(
                f"{value!r} is not a job id: it has up to 200 letters, digits, '_' and '-'",
                param,
                ctx,
            )
        return str(value)


class Seconds(click.FloatRange):
    """A number of seconds; NaN is rejected."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            float(value)
        except ValueError:
            self.fail(f"{value!r} is not a number of seconds, such as 300", param, ctx)
        seconds: float = super().convert(value, param, ctx)
        if seconds != seconds:
            self.fail(f"{value!r} is not a number", param, ctx)
        return seconds


timeout_option = click.option(
    "--timeout",
    type=Seconds(min=0),
    metavar="S",
    help="Fail after S seconds without output of the job.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, one object per line."
)
log_format_option = click.option(
    "--log-format",
    type=click.Choice(["auto", "text", "json"]),
    default="auto",
    show_default=True,
    help="Lines on stderr: text, or one JSON object per line; auto is text on a terminal.",
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")


@contextmanager
def client(url: str, instead: str = "", *, quiet: bool = False) -> Iterator[Client]:
    """Yield a client of the Redis at `url`. `instead`: see `check_server`. If the server does not
    answer later, stderr says it, unless `quiet`."""
    from jobs import Client

    check_server(url, instead)
    with (
        interrupts_raise(),
        Client(url) as connected,
        _redis_errors(connected.redis),
        RedisWatch(url, patience_of(connected.redis), quiet=quiet),
    ):
        yield connected


@contextmanager
def connection(url: str) -> Iterator[Redis]:
    """Yield a plain connection to the Redis at `url`, for reading. A command that gets no reply for
    as long as `check_server` waits fails."""
    from jobs.store.connection.connect import connect, limit_waits

    check_server(url)
    with interrupts_raise(), connect(url) as redis, _redis_errors(redis):
        limit_waits(redis, patience_of(redis))
        yield redis


@contextmanager
def _redis_errors(redis: Redis) -> Iterator[None]:
    """Raise errors of Redis as JobErrors, which name the server and say what to do."""
    from redis import RedisError

    from jobs.store.connection.connect import redis_failure

    try:
        yield
    except RedisError as error:
        raise redis_failure(redis, error) from error


def check_server(url: str, instead: str = "") -> None:
    """Raise with a hint for the user if no Redis answers at `url` soon. `instead`: what this
    command can do without that server."""
    import threading

    from redis import RedisError

    from jobs import JobError
    from jobs.store.connection.connect import (
        MAYBE_NO_TLS,
        connect,
        nothing_listens,
        redis_failure,
        server_name,
        uses_tls,
    )

    try:
        redis = connect(url)
    except JobError as error:
        raise click.BadParameter(error.message, param_hint=_redis_source()) from None
    failed: list[RedisError] = []

    def ping() -> None:
        try:
            redis.ping()
        except RedisError as error:
            failed.append(error)

    # On a thread: retries, several Sentinels and the look-up of a name have limits of their own.
    patience = patience_of(redis)
    asking = threading.Thread(target=ping, daemon=True)
    asking.start()
    asking.join(patience)
    if asking.is_alive():
        raise Unavailable(
            f"Redis at {server_name(redis)} does not answer within {patience:g} s: it hangs, is "
            "busy or can't be reached; try again, or give it longer with ?socket_timeout=S in the "
            f"URL{MAYBE_NO_TLS if uses_tls(redis) else ''}"
        )
    redis.close()
    for failure in failed:
        message = redis_failure(redis, failure).message
        if nothing_listens(redis, failure):
            message += (
                "; start Redis (redis-server --appendonly yes, or: docker compose up -d redis) "
                "or select another server with --redis URL"
            )
            message += f", or {instead}" if instead else ""
        raise Unavailable(message) from None


def patience_of(redis: Redis) -> float:
    """Seconds that a command waits for Redis: ANSWER_SECONDS, unless the URL has a time-out."""
    from jobs.store.connection.connect import SOCKET_SECONDS

    seconds = float(redis.connection_pool.connection_kwargs["socket_timeout"])
    return ANSWER_SECONDS if seconds == SOCKET_SECONDS else seconds
