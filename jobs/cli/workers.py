"""`chatjobs workers`: pause, resume and drain running workers, and wait for their answers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.failures import Failure, sentence
from jobs.cli.options import Seconds, client, json_option, quiet_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.errors import JobError
from jobs.sizes import counted

if TYPE_CHECKING:
    from redis import Redis

    from jobs.store.operator import Call


@click.group()
def workers() -> None:
    """Pause, resume or drain running workers. `chatjobs status` lists them.

    They need an operator's rights in Redis, which producers lack (docs/operations.md, Users).
    """


def _commands_workers(command: Callable[[], None]) -> Callable[..., Any]:
    """The arguments and options of a command to workers, which is sent by its name."""

    @click.argument("names", metavar="[NAME]...", nargs=-1)
    @click.option("--all", "every", is_flag=True, help="All running workers.")
    @click.option("--timeout", type=Seconds(min=0), metavar="S", help="Fail after S seconds.")
    @json_option
    @quiet_option
    @redis_option
    @functools.wraps(command)
    def run(
        names: tuple[str, ...],
        every: bool,
        timeout: float | None,
        as_json: bool,
        quiet: bool,
        redis_url: str,
    ) -> None:
        if bool(names) == every:
            raise click.UsageError("select the workers: give their names, or --all")
        if "" in names:
            raise click.UsageError("the name of a worker is empty: chatjobs status lists them")
        name = command.__name__
        with client(redis_url, quiet=quiet) as connected:
            calls = _called(connected.redis, names, name)
            errors: list[JobError] = []
            for worker, call in calls:
                shows = None if as_json or quiet else _print
                answer = call if isinstance(call, JobError) else _answer(call, timeout, shows)
                if isinstance(answer, JobError):
                    errors.append(answer)
                if as_json:
                    print_json(_facts(worker, answer))
        if len(errors) == len(calls) == 1:
            raise errors[0]
        if errors:
            failed = f"{len(errors)} of {counted(len(calls), 'worker')} did not {name}"
            raise Failure(failed, lines=() if as_json else [sentence(one) for one in errors])

    return run


@workers.command()
@_commands_workers
def pause() -> None:
    """Let workers claim no more jobs, until they are resumed or end. Their running jobs go on.

    NAME is that of a worker, or its beginning if no other worker has it.
    """


@workers.command()
@_commands_workers
def resume() -> None:
    """Let paused or drained workers claim jobs again."""


@workers.command()
@_commands_workers
def drain() -> None:
    """Pause workers, and wait until their running jobs have ended. They keep their models; after
    that, ending one returns no job.

    With --timeout, a worker whose jobs still run then stays paused.
    """


def _called(
    redis: Redis, names: tuple[str, ...], command: str
) -> list[tuple[str, Call | JobError]]:
    """Send the command to the workers of these names, or to all: they work on it at once."""
    from redis import RedisError

    from jobs.store.connection.connect import redis_failure
    from jobs.store.operator import send
    from jobs.store.worker_status import read_statuses

    workers = read_statuses(redis)
    running = [str(one["name"]) for one in workers.running]
    if not names and not running:
        raise JobError("not_found", "no worker is running")
    calls: list[tuple[str, Call | JobError]] = []
    for given in names or running:
        found = workers.called(given)
        if len(found) > 1:
            error = f"'{given}' is the beginning of {len(found)} names: {', '.join(found)}"
            calls.append((given, JobError("not_found", error)))
            continue
        name = found[0] if found else given
        if name in (called for called, _ in calls):
            continue
        try:
            calls.append((name, send(redis, name, command, {})))
        except JobError as failed:
            calls.append((name, failed))
        except RedisError as failed:  # others may have received it
            calls.append((name, redis_failure(redis, failed)))
    return calls


def _answer(
    call: Call, timeout: float | None, show: Callable[[str, Mapping[str, Any]], None] | None
) -> Mapping[str, Any] | JobError:
    """The last answer. `show` is called with the name of the worker and each answer."""
    facts: Mapping[str, Any] = {}
    try:
        for answer in call.answers(timeout):
            facts = answer.facts
            if show is not None:
                show(call.worker, facts)
    except JobError as error:
        return error
    return facts


def _print(worker: str, facts: Mapping[str, Any]) -> None:
    """A worker of another version may leave out what this one says."""
    running, reason = facts.get("running"), facts.get("reason")
    jobs = counted(running, "running job") if isinstance(running, int) else "running jobs unknown"
    claims = f"claims no jobs, {reason}" if reason else "claims jobs"
    state = facts.get("state", "unknown") if reason is None else claims
    echo(f"{worker}: {state}; {jobs}", err=True)


def _facts(worker: str, answer: Mapping[str, Any] | JobError) -> dict[str, Any]:
    """The answer of a worker as JSON."""
    known: Mapping[str, Any] = {} if isinstance(answer, JobError) else answer
    facts = {name: known.get(name) for name in ("state", "reason", "running")}
    error = answer.to_dict() if isinstance(answer, JobError) else None
    return {"worker": worker, **facts, "error": error}
