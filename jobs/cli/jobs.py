"""`chatjobs jobs`: the jobs in Redis: list, show, requeue, cancel and purge them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from jobs.cli.answer import counted, print_json
from jobs.cli.failures import Failure
from jobs.cli.options import JobId, Seconds, client, json_option, quiet_option, redis_option

if TYPE_CHECKING:
    from jobs import Client
    from jobs.client.dead_letters import FoundJob, Selection
    from jobs.client.steps import Steps

STATES = ("deferred", "scheduled", "queued", "started", "finished", "failed", "cancelled")
MAX_LISTED = 10**9
WIDTH = 160  # of the table, if stdout is not a terminal


@click.group(name="jobs")
def jobs_group() -> None:
    """List jobs by state, run, error and age; show, requeue, cancel or delete them."""


def selection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that select jobs; the command gets them as one dict, `chosen`."""

    @click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="State.")
    @click.option("--run", metavar="ID", help="Run.")
    @click.option("-m", "--model", metavar="M", help="Model.")
    @click.option("--code", metavar="CODE", help="Error code, such as worker_lost.")
    @click.option(
        "--older",
        type=Seconds(min=0),
        metavar="S",
        help="Seconds since the job ended, or since it was enqueued.",
    )
    @functools.wraps(command)
    def with_selection(
        states: tuple[str, ...],
        run: str | None,
        model: str | None,
        code: str | None,
        older: float | None,
        **rest: Any,
    ) -> Any:
        chosen = {"states": states, "run": run, "model": model, "code": code, "older": older}
        return command(chosen={name: value for name, value in chosen.items() if value}, **rest)

    return with_selection


@jobs_group.command(name="list")
@selection_options
@click.option(
    "--limit",
    type=click.IntRange(min=1, max=MAX_LISTED),
    default=100,
    show_default=True,
    help="Jobs to list.",
)
@json_option
@redis_option
def list_jobs(chosen: dict[str, Any], limit: int, as_json: bool, redis_url: str) -> None:
    """List the jobs in Redis. Those that ended long ago are not kept there."""
    with client(redis_url) as connected:
        found = _find(connected, chosen, STATES)
        if as_json:
            for one in islice(found, limit):
                print_json(_facts(one))
            return
        shown = list(islice(found, limit))
        more = next(found, None) is not None
    _print_table(shown)
    if more:
        click.echo(f"more than {limit} jobs: --limit N lists more", err=True)


@jobs_group.command()
@click.argument("job_id", metavar="JOB", type=JobId())
@json_option
@redis_option
def show(job_id: str, as_json: bool, redis_url: str) -> None:
    """Show the state, the error, the failed attempts and the request of JOB."""
    from jobs.client.dead_letters import read_job
    from jobs.client.steps import run_sync

    with client(redis_url) as connected:
        found = run_sync(read_job(job_id), connected.connection)
    facts = _facts(found)
    if as_json:
        print_json(facts | {"request": found.state.request})
        return
    error, failures = facts.pop("error"), facts.pop("failures")
    for name, value in facts.items():
        click.echo(f"{name}: {value}")
    if error is not None:
        click.echo(f"error: {error['message']} ({error['code']})")
    for one in failures:
        click.echo(
            f"attempt {one['attempt']} failed at {one['at']:%Y-%m-%d %H:%M:%S}Z "
            f"on {one['worker']}: {one['message']} ({one['code']})"
        )
    click.echo("request:")
    print_json(found.state.request)


def change(past: str, default: tuple[str, ...]) -> Callable[..., Any]:
    """The options of a command that changes jobs. `default`: the states that it selects."""

    def decorate(act: Callable[[str], Steps[bool]]) -> Callable[..., Any]:
        @click.argument("job_ids", metavar="[JOB]...", nargs=-1, type=JobId())
        @selection_options
        @click.option("--all", "every", is_flag=True, help=f"All that are {' or '.join(default)}.")
        @quiet_option
        @redis_option
        @functools.wraps(act)
        def command(
            job_ids: tuple[str, ...],
            chosen: dict[str, Any],
            every: bool,
            quiet: bool,
            redis_url: str,
        ) -> None:
            if bool(job_ids) + bool(chosen) + every != 1:
                raise click.UsageError(
                    "select the jobs: give their ids, or options such as --run, or --all"
                )
            with client(redis_url) as connected:
                _change(connected, job_ids or _ids(connected, chosen, default), act, past, quiet)

        return command

    return decorate


@jobs_group.command()
@change("requeued", ("failed",))
def requeue(job_id: str) -> Steps[bool]:
    """Put failed or cancelled jobs back into their queues; each runs as a new attempt."""
    from jobs.client.dead_letters import requeue

    return requeue(job_id)


@jobs_group.command()
@change("cancelled", ("deferred", "scheduled", "queued", "started"))
def cancel(job_id: str) -> Steps[bool]:
    """Cancel deferred, scheduled, queued or running jobs; those that run stop soon after."""
    from jobs.client.cancel import cancel

    return cancel(job_id)


@jobs_group.command()
@change("deleted", ("failed", "cancelled"))
def purge(job_id: str) -> Steps[bool]:
    """Delete jobs that have ended from Redis. Their rows in Parquet are kept."""
    from jobs.client.dead_letters import purge

    return purge(job_id)


def _change(
    connected: Client,
    job_ids: tuple[str, ...],
    act: Callable[[str], Steps[bool]],
    past: str,
    quiet: bool,
) -> None:
    from jobs import JobError
    from jobs.client.steps import run_sync

    done = 0
    for job_id in job_ids:
        try:
            if run_sync(act(job_id), connected.connection):
                done += 1
            else:
                status = connected.job(job_id).status()
                click.echo(f"{job_id}: not {past}, it is {status}", err=True)
        except JobError as error:
            if error.code != "not_found":
                raise
            click.echo(f"{job_id}: {error.message}", err=True)
    if not quiet:
        click.echo(f"{counted(done, 'job')} {past}", err=True)
    if done < len(job_ids):
        raise Failure(f"{len(job_ids) - done} of {counted(len(job_ids), 'job')} not {past}")


def _find(
    connected: Client, chosen: dict[str, Any], default: tuple[str, ...]
) -> Iterator[FoundJob]:
    from jobs.client.dead_letters import find_jobs

    return find_jobs(connected.redis, _selection(chosen, default))


def _ids(connected: Client, chosen: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """All are found before the first is changed. One that changed its state meanwhile is found
    twice."""
    return tuple(dict.fromkeys(one.state.id for one in _find(connected, chosen, default)))


def _selection(chosen: dict[str, Any], default: tuple[str, ...]) -> Selection:
    from jobs.client.dead_letters import Selection
    from jobs.client.state import Status

    states = tuple(Status(name) for name in chosen.get("states") or default)
    return Selection(**{**chosen, "states": states})


def _facts(found: FoundJob) -> dict[str, Any]:
    state = found.state
    return {
        "id": state.id,
        "status": state.status.value,
        "model": state.queue.partition(":")[2],
        "queue": state.queue,
        "run": found.run,
        "attempt": state.attempt,
        "since": datetime.fromtimestamp(found.since, UTC),
        "error": state.error.to_dict() if state.error is not None else None,
        "failures": [
            one | {"at": datetime.fromtimestamp(one["at"], UTC)} for one in found.failures
        ],
    }


def _print_table(found: list[FoundJob]) -> None:
    import sys

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    for name in ("job", "status", "model", "run", "attempt", "since", "error"):
        table.add_column(name)
    for one in found:
        facts, error = _facts(one), one.state.error
        since = facts["since"].isoformat(timespec="seconds")
        text = f"{error.code}: {error.message}"[:60] if error is not None else ""
        cells = (facts["id"], facts["status"], facts["model"], facts["run"], facts["attempt"])
        table.add_row(*(Text(str(cell)) for cell in (*cells, since, text)))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table if found else "no jobs")
