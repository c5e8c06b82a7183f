"""Waiting for many jobs: for their ends, and for their rows in Parquet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.exceptions import OutOfMemoryError

from jobs.api.answer import ChatCompletion
from jobs.api.score_result import ScoreResult
from jobs.api.wire import describe
from jobs.client.wait import Ends
from jobs.errors import JobError, WaitTimeout, invalid
from jobs.operations import Request
from jobs.results.outbox import DEFAULT_RUN, run_of
from jobs.sizes import counted
from jobs.store.backlog import count_entries, read_first_entry, read_last_entry
from jobs.store.connection.protocol import Emit, Emitting, Steps, sleep
from jobs.store.job_state import Status, read_outcome, read_state, unknown
from jobs.store.part_plans import want_rows

# Seconds between two looks at an outbox: first, and at most. Each pause is longer than the one
# before by PAUSE_GROWTH, so that the end is seen late by at most about an eighth of the wait.
FIRST_SECONDS, ROWS_SECONDS, PAUSE_GROWTH = 0.0125, 0.1, 1.125

J = TypeVar("J")


def jobs_in(given: Any, kind: type[J]) -> list[J]:
    """The jobs in an argument that is a job, or a collection of jobs and such collections. Raises
    InvalidRequest for anything else."""
    if isinstance(given, kind):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return [job for one in given for job in jobs_in(one, kind)]
    raise invalid(f"a job or a list of jobs is needed here; got {describe(given)}", "jobs")


def follow_ends(job_ids: Iterable[str], timeout: float | None) -> Emitting[str]:
    """Emits each job when it has ended."""
    ends = Ends(job_ids, timeout)
    try:
        while ended := (yield from ends.next()):
            for state in ended:
                yield Emit(state.id)
    finally:
        ends.close()


def gather_outcomes(
    job_ids: Sequence[str], timeout: float | None, keep_errors: bool
) -> Steps[list[ChatCompletion | ScoreResult | JobError]]:
    """The outcomes in the order of the ids. Raises the first error, unless `keep_errors`."""
    ends = Ends(job_ids, timeout)
    outcomes: dict[str, ChatCompletion | ScoreResult | JobError] = {}
    try:
        while ended := (yield from ends.next()):
            for state in ended:
                try:
                    if state.status is Status.UNKNOWN:
                        raise unknown(state.id)
                    outcomes[state.id] = yield from read_outcome(state, ends.deadline)
                except JobError as error:
                    if not keep_errors:
                        raise
                    outcomes[state.id] = error
    finally:
        ends.close()
    return [outcomes[job_id] for job_id in job_ids]


def wait_for_rows(requests: Mapping[str, Request | None], timeout: float | None) -> Steps[None]:
    """Return when the rows of the jobs are in Parquet. `requests`: by job id, None if not known.

    Raises WaitTimeout, which says whether jobs or rows are missing.
    """
    ends = Ends(requests, timeout)
    try:
        while ended := (yield from ends.next()):
            for state in ended:
                if state.status is Status.UNKNOWN:
                    raise unknown(state.id)
    finally:
        ends.close()
    runs: dict[str, None] = {}
    for job_id, request in requests.items():
        if request is None:
            state = yield from read_state(job_id, full=True, deadline=ends.deadline)
            runs[run_of(state.request)] = None
        else:
            runs[request.job.run or DEFAULT_RUN] = None
    for run in runs:
        yield from wait_for_outbox(run, timeout, ends.deadline)


def wait_for_outbox(
    run: str, timeout: float | None = None, deadline: float | None = None
) -> Steps[None]:
    """Return when the rows that are in the outbox now have left it: they are in a file then.

    The first id grows as long as the outbox exists. A smaller one is that of a new outbox, made
    after all rows of the old one had left it and the clock of Redis was set back.
    """
    last = yield from read_last_entry(run, deadline)
    if last is None:
        return
    # A full Redis refuses it: the rows are written without hurry then.
    with suppress(OutOfMemoryError):
        yield from want_rows(run, deadline)
    pause, before = FIRST_SECONDS, (0, 0)
    while (first := (yield from read_first_entry(run, deadline))) is not None:
        if first > last or first < before:
            return
        before = first
        if deadline is not None and time.monotonic() >= deadline:
            count = yield from count_entries(run, deadline)
            are, them = ("is", "it") if count == 1 else ("are", "them")
            raise WaitTimeout(
                f"the jobs have ended, but {counted(count, 'row')} of run {run!r} {are} not in "
                f"Parquet after {timeout:g} s: Redis keeps {them} until a worker writes {them}; "
                "chatjobs status says why",
            )
        yield sleep(pause)
        pause = min(PAUSE_GROWTH * pause, ROWS_SECONDS)
