"""Commands that change jobs: `jobs requeue`, `cancel` and `purge`, and `cancel`, the same as `jobs
cancel`. Each says what happened to the jobs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jobs.cli.answer import counted
from jobs.cli.failures import Failure, sentence
from jobs.cli.options import JobId, client, quiet_option, redis_option
from jobs.cli.output import echo
from jobs.cli.selection import find, selection_options

if TYPE_CHECKING:
    from jobs import Client


class Outcome(NamedTuple):
    """What happened to a job, after its id or a number of jobs: "cancelled"."""

    words: str
    ok: bool = True


def not_done(past: str, status: str) -> Outcome:
    """The job has a state that rules the change out."""
    return Outcome(f"not {past}, it is {status}", ok=False)


def changes_jobs(past: str, default: tuple[str, ...]) -> Callable[..., Any]:
    """The options of a command that changes jobs. `default`: the states that it selects."""

    def decorate(change: Callable[[Client, str], Outcome]) -> Callable[..., Any]:
        @click.argument("job_ids", metavar="[JOB]...", nargs=-1, type=JobId())
        @selection_options
        @click.option("--all", "every", is_flag=True, help=f"All that are {' or '.join(default)}.")
        @quiet_option
        @redis_option
        @functools.wraps(change)
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
                if job_ids:
                    _change_given(connected, job_ids, change, past, quiet)
                else:
                    _change_found(connected, _ids(connected, chosen, default), change, past, quiet)

        return command

    return decorate


def _change_given(
    connected: Client,
    job_ids: tuple[str, ...],
    change: Callable[[Client, str], Outcome],
    past: str,
    quiet: bool,
) -> None:
    """Print what happened to each job. The others are changed if one is unknown."""
    from jobs import JobError

    errors = []
    for job_id in job_ids:
        try:
            words, ok = change(connected, job_id)
        except JobError as error:
            if error.code != "not_found":
                raise
            errors.append(sentence(error))
            continue
        if not ok:
            errors.append(f"{job_id}: {words}")
        elif not quiet:
            echo(f"{job_id}: {words}", err=True)
    if len(job_ids) == 1 and errors:
        raise Failure(errors[0])
    if errors:
        raise Failure(f"{len(errors)} of {len(job_ids)} jobs not {past}", lines=errors)


def _change_found(
    connected: Client,
    job_ids: tuple[str, ...],
    change: Callable[[Client, str], Outcome],
    past: str,
    quiet: bool,
) -> None:
    """Print what happened to how many jobs. Those that have changed since they were found are named
    with their number alone."""
    from jobs import JobError

    outcomes: Counter[Outcome] = Counter()
    for job_id in job_ids:
        try:
            outcomes[change(connected, job_id)] += 1
        except JobError as error:
            if error.code != "not_found":
                raise
            outcomes[Outcome(f"not {past}, Redis has deleted it", ok=False)] += 1
    if not quiet:
        for (words, _), count in outcomes.items() or [(Outcome(past), 0)]:
            echo(f"{counted(count, 'job')} {words}", err=True)
    failed = sum(count for outcome, count in outcomes.items() if not outcome.ok)
    if failed:
        raise Failure(f"{failed} of {counted(len(job_ids), 'job')} not {past}")


def _ids(connected: Client, chosen: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """All are found before the first is changed. One that changed its state meanwhile is found
    twice."""
    return tuple(dict.fromkeys(one.state.id for one in find(connected, chosen, default)))
