"""Exceptions become one line on stderr and an exit code."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn

import click

from jobs.cli.interrupts import INTERRUPTED
from jobs.cli.output import (
    echo,
    encodable,
    open_devnull,
    print_json,
    printable,
    report,
    show_log_lines,
)

if TYPE_CHECKING:
    from jobs.errors import JobError

STDOUT_CLOSED = 141  # 128 + SIGPIPE
NO_THREAD = "this process can't start more threads"
AS_JSON = "chatjobs.as_json"  # in the context's meta: the command line contains --json


class Failure(click.ClickException):
    """A job or a check failed: exit code 1.

    `error` is the JobError behind it; `lines` are printed before the message.
    """

    label = "error"
    code = "failed"  # with --json, unless a JobError has one

    def __init__(
        self, message: str, error: JobError | None = None, lines: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.error, self.lines = error, list(lines)

    def show(self, file: IO[Any] | None = None) -> None:
        for line in self.lines:
            echo(line, err=True)
        if self.label:
            report(self.label, self.message, "red")
        else:
            echo(self.message, err=True)


class NotFound(Failure):
    """The requested thing does not exist."""

    code = "not_found"


class WrongField(click.UsageError):
    """An option of the command line is an invalid field of a request."""

    def __init__(self, error: JobError) -> None:
        super().__init__(error.message)
        self.error = error


class WrongInput(Failure):
    """The data that was given is wrong, as opposed to the command line."""

    exit_code = 2
    code = "invalid_request"


class Unavailable(Failure):
    """Redis, a model, a device or the disk is unavailable."""

    exit_code = 3
    code = "unavailable"


class Interrupted(Failure):
    """Ctrl-C. The message says what goes on."""

    exit_code = INTERRUPTED
    code = "interrupted"
    label = ""


def error_object(shown: click.ClickException) -> dict[str, Any]:
    """Return an exception as a JSON object, in the form of OpenAI's errors."""
    message, lines = shown.format_message(), []
    error, code = None, "invalid_request" if shown.exit_code == 2 else "failed"
    if isinstance(shown, Failure):
        error, lines, code = shown.error, shown.lines, shown.code
    elif isinstance(shown, WrongField):
        error = shown.error
    content: dict[str, Any]
    if error is not None:
        content = error.to_dict() | {"message": message}
    else:
        content = {
            "message": message,
            "type": "invalid_request_error" if shown.exit_code == 2 else "server_error",
            "param": None,
            "code": code,
        }
    if lines:
        content["lines"] = lines
    return {"error": content}


def printable_error(error: click.ClickException) -> click.ClickException:
    """The error as click may print it: its message may quote what a user has typed, and click
    writes UTF-8 where the encoding is ASCII."""
    text = encodable(printable(error.message, err=True), sys.stderr)
    vars(error)["message"] = text  # click declares it final
    return error


def context_settings() -> dict[str, Any]:
    """Return click's settings: -h beside --help, no colour if NO_COLOR is set."""
    return {
        "help_option_names": ["-h", "--help"],
        "color": False if os.environ.get("NO_COLOR") else None,
    }


class CommandGroup(click.Group):
    """A group that lists commands in the order they were added and prints no traceback.

    With --json, it prints an error as JSON.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = args[: args.index("--")] if "--" in args else args
        ctx.meta[AS_JSON] = "--json" in options
        return super().parse_args(ctx, args)

    def make_context(self, *args: Any, **options: Any) -> click.Context:
        try:
            return super().make_context(*args, **options)
        except click.ClickException as error:
            raise printable_error(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning  # type: ignore[assignment]
            show_log_lines()
            try:
                return self._invoke(ctx)
            except click.ClickException as error:
                if not ctx.meta[AS_JSON]:
                    raise printable_error(error) from None
                print_json(error_object(error), err=True)
                ctx.exit(error.exit_code)

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None
        except BrokenPipeError:
            sys.stdout = open_devnull()  # the interpreter flushes it at exit
            ctx.exit(STDOUT_CLOSED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if os.environ.get("CHATJOBS_DEBUG") == "1":
                raise
            raise to_failure(error) from None


def end_process(failure: Failure, *, as_json: bool) -> NoReturn:
    """Print a failure as the last line, and end the process at once with its exit code, without
    clean-up. For threads other than the main one."""
    for handler in logging.getLogger().handlers:
        handler.acquire()  # for good: no other thread logs after the failure
    try:
        if as_json:
            print_json(error_object(failure), err=True)
        else:
            failure.show()
    finally:
        os._exit(failure.exit_code)


def to_failure(error: Exception) -> Failure:
    """Return the failure to print for an exception that no command handled."""
    from jobs.errors import JobError

    if isinstance(error, JobError):
        kind = {"unavailable": Unavailable, "invalid_request": WrongInput}.get(error.code, Failure)
        return kind(sentence(error), error)
    redis = sys.modules.get("redis")
    if redis is not None and isinstance(error, redis.RedisError):
        return Unavailable(f"Redis: {error}")
    if isinstance(error, OSError):
        from pathlib import Path

        from jobs.disk_faults import explain, explain_denied, is_full

        if isinstance(error, PermissionError) and error.filename:
            return Unavailable(explain_denied(error))
        if error.filename and is_full(error):
            return Unavailable(explain(error, Path(error.filename)))
        return Unavailable(str(error) if error.filename else error.strerror or str(error))
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return Unavailable(f"{NO_THREAD}: {more_threads()}")
    message = f"unexpected {type(error).__name__}: {error} (CHATJOBS_DEBUG=1 shows the traceback)"
    return Failure(message, JobError("internal", message))


def more_threads() -> str:
    """Return what to do if no thread can be started."""
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    given = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit}"
    return (
        f"raise `ulimit -u` ({given} now, for all processes and threads of this user), the limit "
        "of the container (docker run --pids-limit) or `ulimit -v`"
    )


def sentence(error: JobError) -> str:
    """The message of an error; its code follows where it says more than that there is an error."""
    plain = error.code in ("invalid_request", "not_found", "unavailable", "internal")
    return error.message if plain else f"{error.message} ({error.code})"


def show_warning(message: Warning | str, *_: Any) -> None:
    """Print a warning; `warnings.showwarning` while a command runs."""
    report("warning", str(message), "yellow")
