"""Commands that change jobs: `jobs requeue`, `cancel` and `purge`, and `cancel`, the same as `jobs
cancel`. Each says what happened to the jobs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jobs.cli.failures import Failure, sentence
from jobs.cli.options import JobId, client, json_option, quiet_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.cli.selection import find, selection_options
from jobs.errors import JobError, invalid
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Client


class Outcome(NamedTuple):
    """The result of a change to a job."""

    words: str  # after its id or a number of jobs: "cancelled"
    status: str | None  # of the job now; None if Redis has it no more
    ok: bool = True
    error: JobError | None = None  # None: the words say it

    def facts(self, job_id: str) -> dict[str, Any]:
        """The outcome as JSON."""
        error = self.error
        if error is None and not self.ok:
            error = invalid(f"{job_id}: {self.words}")
        shown = None if error is None else error.to_dict()
        return {"id": job_id, "done": self.ok, "status": self.status, "error": shown}


def not_done(past: str, status: str) -> Outcome:
    """The job has a state that rules the change out."""
    return Outcome(f"not {past}, it is {status}", status, ok=False)


def changes_jobs(
    past: str, default: tuple[str, ...], other: str | None = None
) -> Callable[..., Any]:
    """The options of a command that changes jobs. `default`: the states that it selects without
    --state. `other`: a state that it changes as well, but only with --state."""

    def decorate(change: Callable[[Client, str], Outcome]) -> Callable[..., Any]:
        @click.argument("job_ids", metavar="[JOB]...", nargs=-1, type=JobId())
        @selection_options
        @click.option("--all", "every", is_flag=True, help=f"All that are {' or '.join(default)}.")
        @json_option
        @quiet_option
        @redis_option
        @functools.wraps(change)
        def command(
            job_ids: tuple[str, ...],
            chosen: dict[str, Any],
            every: bool,
            as_json: bool,
            quiet: bool,
            redis_url: str,
        ) -> None:
            if bool(job_ids) + bool(chosen) + every != 1:
                raise click.UsageError(
                    "select the jobs: give their ids, or options such as --run, or --all"
                )
            with client(redis_url) as connected:
                ids = job_ids or _ids(connected, chosen, default)
                outcomes = _changed(connected, ids, change, past)
                if as_json:
                    _print_facts(outcomes, past)
                elif job_ids:
                    _print_each(outcomes, past, quiet)
                else:
                    _print_counts(outcomes, past, quiet)
                    if other is not None and chosen and "states" not in chosen and not quiet:
                        _print_others(connected, chosen, other, past)

        return command

    return decorate


def _changed(
    connected: Client, ids: tuple[str, ...], change: Callable[[Client, str], Outcome], past: str
) -> Iterator[tuple[str, Outcome]]:
    """Change the jobs. The others are changed if one is unknown."""
    for job_id in ids:
        try:
            yield job_id, change(connected, job_id)
        except JobError as error:
            if error.code != "not_found":
                raise
            words = f"not {past}, Redis does not have it"
            yield job_id, Outcome(words, None, ok=False, error=error)


def _print_facts(outcomes: Iterator[tuple[str, Outcome]], past: str) -> None:
    count = failed = 0
    for job_id, outcome in outcomes:
        print_json(outcome.facts(job_id))
        count, failed = count + 1, failed + (not outcome.ok)
    _fail_if_any(failed, count, past)


def _print_each(outcomes: Iterator[tuple[str, Outcome]], past: str, quiet: bool) -> None:
    """Print what happened to each of the jobs that were given by their ids."""
    errors, count = [], 0
    for job_id, outcome in outcomes:
        count += 1
        if not outcome.ok:
            error = outcome.error
            errors.append(sentence(error) if error else f"{job_id}: {outcome.words}")
        elif not quiet:
            echo(f"{job_id}: {outcome.words}", err=True)
    if count == 1 and errors:
        raise Failure(errors[0])
    _fail_if_any(len(errors), count, past, errors)


def _print_counts(outcomes: Iterator[tuple[str, Outcome]], past: str, quiet: bool) -> None:
    """Print what happened to how many jobs. Those that have changed since they were found are named
    with their number alone."""
    counts = Counter((outcome.words, outcome.ok) for _, outcome in outcomes)
    if not quiet:
        for (words, _), count in counts.items() or [((past, True), 0)]:
            echo(f"{counted(count, 'job')} {words}", err=True)
    failed = sum(count for (_, ok), count in counts.items() if not ok)
    _fail_if_any(failed, counts.total(), past)


def _print_others(connected: Client, chosen: dict[str, Any], state: str, past: str) -> None:
    """Say how many of the jobs have the state that only --state selects."""
    count = sum(1 for _ in find(connected, chosen, (state,)))
    if count:
        were = "is" if count == 1 else "are"
        echo(
            f"{counted(count, 'job')} that {were} {state} {were} not {past}: add --state {state}",
            err=True,
        )


def _fail_if_any(failed: int, count: int, past: str, lines: Sequence[str] = ()) -> None:
    if failed:
        raise Failure(f"{failed} of {counted(count, 'job')} not {past}", lines=lines)


def _ids(connected: Client, chosen: dict[str, Any], default: tuple[str, ...]) -> tuple[str, ...]:
    """All are found before the first is changed. One that changed its state meanwhile is found
    twice."""
    return tuple(dict.fromkeys(one.state.id for one in find(connected, chosen, default)))
