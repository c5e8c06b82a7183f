"""Exceptions become one line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
import warnings
from typing import IO, Any

import click

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
STDOUT_CLOSED = 141  # 128 + SIGPIPE


def open_devnull() -> IO[str]:
    """Return a stdout that discards its output."""
    return open(os.devnull, "w", encoding="utf-8")


class Failure(click.ClickException):
    """A job or a check failed: exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(click.style("error:", fg="red") + f" {self.message}", file=file, err=True)


class Unavailable(Failure):
    """Redis, a model, a device or the disk is unavailable."""

    exit_code = 3


def context_settings() -> dict[str, Any]:
    """Return click's settings: -h beside --help, no colour if NO_COLOR is set."""
    return {
        "help_option_names": ["-h", "--help"],
        "color": False if os.environ.get("NO_COLOR") else None,
    }


class CommandGroup(click.Group):
    """A group that lists commands in the order they were added and prints no traceback."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("interrupted", err=True)
                ctx.exit(INTERRUPTED)
            except BrokenPipeError:
                sys.stdout = open_devnull()  # the interpreter flushes it at exit
                ctx.exit(STDOUT_CLOSED)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:
                if os.environ.get("CHATJOBS_DEBUG") == "1":
                    raise
                raise to_failure(error) from None


def to_failure(error: Exception) -> Failure:
    """Return the failure to print for an exception that no command handled."""
    from jobs.errors import JobError

    if isinstance(error, JobError):
        return Failure(str(error))
    redis = sys.modules.get("redis")
    if redis is not None and isinstance(error, redis.RedisError):
        return Unavailable(f"Redis: {error}")
    if isinstance(error, OSError):
        return Unavailable(str(error))
    return Failure(
        f"unexpected {type(error).__name__}: {error} (CHATJOBS_DEBUG=1 shows the traceback)"
    )


def _show_warning(message: Warning | str, *_: Any) -> None:
    click.echo(click.style("warning:", fg="yellow") + f" {message}", err=True)
