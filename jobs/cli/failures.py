"""From exceptions to one sentence on stderr and an exit code: the group that commands run in."""

from __future__ import annotations

import os
import sys
import warnings
from typing import IO, Any

import click

INTERRUPTED, UNREAD = 130, 141  # 128 and the number of the signal, as shells have it


def nowhere() -> IO[str]:
    """A stdout that nobody reads."""
    return open(os.devnull, "w", encoding="utf-8")


class Failure(click.ClickException):
    """A job or a row failed: exit code 1."""

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(click.style("error:", fg="red") + f" {self.message}", file=file, err=True)


class Infrastructure(Failure):
    """Redis, a model or the disk isn't there."""

    exit_code = 3


def context_settings() -> dict[str, Any]:
    """Both help flags; no colour where NO_COLOR asks for none."""
    return {
        "help_option_names": ["-h", "--help"],
        "color": False if os.environ.get("NO_COLOR") else None,
    }


class Commands(click.Group):
    """A group that keeps the order of its commands and lets no traceback out."""

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
                sys.stdout = nowhere()  # with what is still to be flushed
                ctx.exit(UNREAD)
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:
                if os.environ.get("CHATJOBS_DEBUG") == "1":
                    raise
                raise explain(error) from None


def explain(error: Exception) -> Failure:
    """What went wrong, for a person."""
    from jobs.errors import JobError

    if isinstance(error, JobError):
        return Failure(str(error))
    redis = sys.modules.get("redis")
    if redis is not None and isinstance(error, redis.RedisError):
        return Infrastructure(f"Redis: {error}")
    if isinstance(error, OSError):
        return Infrastructure(str(error))
    return Failure(
        f"unexpected {type(error).__name__}: {error} (CHATJOBS_DEBUG=1 shows the traceback)"
    )


def _show_warning(message: Warning | str, *_: Any) -> None:
    click.echo(click.style("warning:", fg="yellow") + f" {message}", err=True)
