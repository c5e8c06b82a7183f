"""`chatjobs jobs`: the jobs in Redis: list, show, requeue, cancel and purge them."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from jobs import keys
from jobs.cli.changes import Outcome, changes_jobs, not_done
from jobs.cli.options import JobId, client, json_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.cli.selection import STATES, find_newest, selection_options
from jobs.cli.table import free_text, number, print_table
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Client
    from jobs.store.find_jobs import FoundJob

MAX_LISTED = 10**9


@click.group(name="jobs")
def jobs_group() -> None:
    """List jobs by state, run, tenant, error and age; show, requeue, cancel or delete them."""


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
    """List the jobs in Redis, newest first: by the time of their end, or of their submit. Those
    that ended long ago are not kept there.

    Without --run, --tenant, --session, --code and --older, only 1,000 jobs (or --limit) of each
    queue and state are compared: those that were queued last, or whose results are kept longest.
    """
    with client(redis_url) as connected:
        found = find_newest(connected, chosen, STATES, limit + 1)  # one more tells if there are any
        if as_json:
            for one in islice(found, limit):
                print_json(_facts(one))
            return
        shown = list(islice(found, limit))
        more = next(found, None) is not None
    _print_table(shown)
    if more:
        echo(f"more than {counted(limit, 'job')}: --limit N lists more", err=True)


@jobs_group.command()
@click.argument("job_id", metavar="JOB", type=JobId())
@json_option
@redis_option
def show(job_id: str, as_json: bool, redis_url: str) -> None:
    """Show the state, the error, the failed attempts and the request of JOB."""
    from jobs.store.connection.protocol import run_sync
    from jobs.store.find_jobs import read_job

    with client(redis_url) as connected:
        found = run_sync(read_job(job_id), connected.connection)
    facts = _facts(found)
    if as_json:
        print_json(facts | {"request": found.state.request})
        return
    error, failures = facts.pop("error"), facts.pop("failures")
    for name, value in facts.items():
        echo(f"{name}: {_moment(value) if isinstance(value, datetime) else value}")
    if error is not None:
        echo(f"error: {error['message']} ({error['code']})")
    for one in failures:
        echo(
            f"attempt {one['attempt']} failed at {_moment(one['at'])} "
            f"on {one['worker']}: {one['message']} ({one['code']})"
        )
    echo("request:")
    print_json(found.state.request)


@jobs_group.command()
@changes_jobs("requeued", ("failed",), "cancelled")
def requeue(connected: Client, job_id: str) -> Outcome:
    """Put failed or cancelled jobs back into their queues; each runs as a new attempt.

    Options such as --run select failed jobs alone, unless there is a --state.
    """
    from jobs.store.connection.protocol import run_sync
    from jobs.store.requeue import requeue

    if run_sync(requeue(job_id), connected.connection):
        return Outcome("requeued", "queued")
    return not_done("requeued", connected.job(job_id).status())


@jobs_group.command()
@changes_jobs("cancelled", ("deferred", "scheduled", "queued", "started"))
def cancel(connected: Client, job_id: str) -> Outcome:
    """Cancel deferred, scheduled, queued or running jobs. Rows keep the text generated so far."""
    job = connected.job(job_id)
    stopped, status = job.cancel(), job.status()
    if not stopped:
        return Outcome(f"already {status}", status)
    return Outcome("cancelled" if status == "cancelled" else "being cancelled by a worker", status)


@jobs_group.command()
@changes_jobs("deleted", ("failed", "cancelled"), "finished")
def purge(connected: Client, job_id: str) -> Outcome:
    """Delete jobs that have ended from Redis. Their rows in Parquet are kept.

    Options such as --run select failed and cancelled jobs alone, unless there is a --state.
    """
    from jobs.store.connection.protocol import run_sync
    from jobs.store.purge import purge

    if run_sync(purge(job_id), connected.connection):
        return Outcome("deleted", None)
    return not_done("deleted", connected.job(job_id).status())


def _facts(found: FoundJob) -> dict[str, Any]:
    state = found.state
    return {
        "id": state.id,
        "status": state.status.value,
        "model": keys.model_of(state.queue),
        "queue": state.queue,
        "run": found.run,
        "attempt": state.attempt,
        "since": datetime.fromtimestamp(found.since, UTC),
        "error": state.error.to_dict() if state.error is not None else None,
        "failures": [
            one | {"at": datetime.fromtimestamp(one["at"], UTC)} for one in found.state.failures
        ],
    }


def _moment(time: datetime) -> str:
    """A time of UTC, in ISO 8601."""
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


def _print_table(found: list[FoundJob]) -> None:
    if not found:
        echo("no jobs")
        return
    rows = []
    for one in found:
        facts, error = _facts(one), one.state.error
        cells = [facts[name] for name in ("id", "status", "model", "run", "attempt")]
        rows.append(
            [
                *cells,
                _moment(facts["since"]),
                f"{error.code}: {error.message}" if error is not None else "",
            ]
        )
    columns = ("job", "status", "model", "run", number("attempt"), "since", free_text("error"))
    print_table(columns, rows)
