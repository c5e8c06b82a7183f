"""Options shared by several commands, and the Redis connection they select."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click
from click.decorators import FC

from jobs.cli.failures import Unavailable
from jobs.cli.interrupts import interrupts_raise

if TYPE_CHECKING:
    from redis import Redis

    from jobs import Client

EMBEDDED = "embedded"


def is_embedded(url: str) -> bool:
    """Whether `--redis` selects a private server."""
    return url == EMBEDDED or url.startswith(f"{EMBEDDED}:")


def _check_redis(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if is_embedded(value):
        raise click.BadParameter(
            "a private Redis would have no worker and end with this command: start chatjobs work "
            "--model M --redis embedded, and give the URL that it prints"
        )
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
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only errors on stderr.")


@contextmanager
def client(url: str) -> Iterator[Client]:
    """Yield a client of the Redis at `url`."""
    from jobs import Client

    check_server(url)
    with interrupts_raise(), Client(url) as connected:
        yield connected


@contextmanager
def connection(url: str) -> Iterator[Redis]:
    """Yield a plain connection to the Redis at `url`, for reading."""
    from jobs.client.connection import connect

    check_server(url)
    with interrupts_raise(), connect(url) as redis:
        yield redis


def check_server(url: str) -> None:
    """Raise with a hint for the user if no Redis answers at `url`."""
    from redis import RedisError

    from jobs import JobError
    from jobs.client.connection import connect, nothing_listens, redis_failure

    try:
        redis = connect(url)
    except JobError as error:
        raise click.BadParameter(error.message, param_hint="'--redis'") from None
    try:
        redis.ping()
    except RedisError as error:
        message = redis_failure(redis, error).message
        if nothing_listens(redis, error):
            message += (
                "; start Redis (redis-server --appendonly yes, or: docker compose up -d redis) "
                "or select another server with --redis URL"
            )
        raise Unavailable(message) from None
    finally:
        redis.close()
