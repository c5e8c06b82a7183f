"""Handles to runs: `Run` blocks, `AsyncRun` is for asyncio.

A run is what its jobs name: those in Redis have it in their requests, their rows are in the folder
of its name. So a handle is an id, a connection and a results folder, and any process can make one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jobs import keys
from jobs.api.caller import run_in_thread
from jobs.api.wire import describe
from jobs.client.wait import Ends, check_timeout
from jobs.client.wait_many import wait_for_outbox
from jobs.errors import JobError, WaitTimeout, invalid
from jobs.store.backlog import count_entries
from jobs.store.connection.protocol import (
    Connection,
    Steps,
    collect,
    run_async,
    run_sync,
    sleep,
)
from jobs.store.find_jobs import Selection, find_jobs
from jobs.store.job_end import cancel
from jobs.store.job_state import Status
from jobs.store.producer_lease import is_held

WAITING = (Status.DEFERRED, Status.SCHEDULED, Status.QUEUED)
OPEN = (*WAITING, Status.STARTED)  # in the order in which a job has them
LOOKS = 2  # that find no open job: one that a worker returns to its queue may be missed once
PRODUCER_SECONDS = 0.5  # between two looks at a run whose producer has no job in Redis

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run at one moment.

    In Redis: `queued` jobs wait for a worker, their time or other jobs; `running` ones are at a
    worker; `unwritten` ones have ended, and their rows are not in Parquet yet. `producing`: a
    process of `chatjobs run` enqueues further rows. In Parquet: `rows`, of which `failed` have an
    error or were cancelled.
    """

    queued: int
    running: int
    unwritten: int
    producing: bool
    rows: int
    failed: int

    @property
    def over(self) -> bool:
        """True if nothing of the run is on its way: `wait` would return."""
        return not (self.queued or self.running or self.unwritten or self.producing)


class Run:
    """The handle to one run. All methods raise JobError.

    `results`: the folder of the runs, by default $CHATJOBS_RESULTS, then ./results; `table`,
    `scores` and the rows of `status` are read there.
    """

    def __init__(self, connection: Connection, run_id: str, results: Folder = None) -> None:
        self.id = check_run_id(run_id)
        self._connection, self._files = connection, _Files(run_id, results)

    def wait(self, timeout: float | None = None) -> None:
        """Return when nothing of the run is queued or running, all rows are in Parquet, and no
        `chatjobs run` enqueues further rows. Raises WaitTimeout after `timeout` seconds."""
        run_sync(wait_for_run(self.id, timeout), self._connection)

    def status(self) -> RunStatus:
        """The jobs and rows of the run now. It reads each open job in Redis, of any run."""
        found = run_sync(count_jobs(self.id), self._connection)
        return self._files.status(found)

    def table(self, columns: Sequence[str] | None = None) -> Any:
        """The rows in Parquet as a pyarrow.Table, one per choice, those of the newest attempt at a
        job, in no particular order. `columns`: only these."""
        return self._files.table(columns)

    def scores(
        self, metrics: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Any:
        """The scores that `chatjobs score` has written, as a pyarrow.Table: one row per choice and
        metric. `metrics`, such as "number:0.01", and `columns`: only these."""
        return self._files.scores((metrics, columns))

    def cancel(self) -> int:
        """Cancel the jobs that are queued or running, of which a worker stops each soon after.
        Returns how many. A `chatjobs run` that enqueues rows goes on with the next ones."""
        return run_sync(cancel_run(self.id), self._connection)

    def __repr__(self) -> str:
        return f"Run({self.id!r})"


class AsyncRun:
    """The handle to one run, see `Run`. Files are read in a thread. All methods raise JobError."""

    def __init__(self, connection: Connection, run_id: str, results: Folder = None) -> None:
        self.id = check_run_id(run_id)
        self._connection, self._files = connection, _Files(run_id, results)

    async def wait(self, timeout: float | None = None) -> None:
        """Return when nothing of the run is on its way, see `Run.wait`."""
        await run_async(wait_for_run(self.id, timeout), self._connection)

    async def status(self) -> RunStatus:
        """The jobs and rows of the run now, see `Run.status`."""
        found = await run_async(count_jobs(self.id), self._connection)
        return await run_in_thread(self._files.status, found)

    async def table(self, columns: Sequence[str] | None = None) -> Any:
        """The rows in Parquet as a pyarrow.Table, see `Run.table`."""
        return await run_in_thread(self._files.table, columns)

    async def scores(
        self, metrics: Sequence[str] | None = None, columns: Sequence[str] | None = None
    ) -> Any:
        """The scores of the run as a pyarrow.Table, see `Run.scores`."""
        return await run_in_thread(self._files.scores, (metrics, columns))

    async def cancel(self) -> int:
        """Cancel the jobs that are queued or running. Returns how many, see `Run.cancel`."""
        return await run_async(cancel_run(self.id), self._connection)

    def __repr__(self) -> str:
        return f"AsyncRun({self.id!r})"


class Jobs(NamedTuple):
    """The jobs of a run in Redis, see RunStatus."""

    queued: int
    running: int
    unwritten: int
    producing: bool


class _Files:
    """The files of a run. pyarrow is imported when they are read."""

    def __init__(self, run: str, folder: Folder) -> None:
        self._run, self._folder = run, folder

    def status(self, jobs: Jobs) -> RunStatus:
        rows = failed = 0
        results = self._results()
        if self._run in results.runs():
            import pyarrow.compute as pc

            data = results.dataset(self._run)
            rows = data.count_rows()
            failed = data.count_rows(filter=pc.field("status") != "ok")
        return RunStatus(*jobs, rows, failed)

    def table(self, columns: Sequence[str] | None) -> Any:
        return self._results().table(self._run, columns)

    def scores(self, wanted: tuple[Sequence[str] | None, Sequence[str] | None]) -> Any:
        return self._results().scores(self._run, *wanted)

    def _results(self) -> Any:
        from jobs.results.files import Results

        return Results(self._folder)


def wait_for_run(run: str, timeout: float | None) -> Steps[None]:
    """Return when nothing of the run is on its way. Raises WaitTimeout."""
    check_timeout(timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    looks = 0
    while looks < LOOKS:
        producing = yield from is_held(run, deadline)  # before its last jobs are looked for
        open_jobs = yield from _open_jobs(run, deadline)
        looks = 0 if producing or open_jobs else looks + 1
        if open_jobs:
            yield from _wait_for_ends(open_jobs, timeout, deadline)
        yield from wait_for_outbox(run, timeout, deadline)
        if producing and not open_jobs:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"run {run!r} has no job that runs, but a process still enqueues its rows "
                    f"after {timeout:g} s (chatjobs run); it can be waited for again"
                )
            yield sleep(PRODUCER_SECONDS)


def count_jobs(run: str) -> Steps[Jobs]:
    """The numbers of the jobs of a run."""
    producing = yield from is_held(run)
    found = yield from _open_jobs(run)
    unwritten = yield from count_entries(run)
    running = sum(status is Status.STARTED for status in found.values())
    return Jobs(len(found) - running, running, unwritten, producing)


def cancel_run(run: str) -> Steps[int]:
    """Cancel the open jobs of a run. Returns how many had not ended."""
    seen: set[str] = set()
    cancelled = 0
    while True:
        found = yield from _open_jobs(run)
        new = [job_id for job_id in found if job_id not in seen]
        if not new:
            return cancelled
        seen.update(new)
        for job_id in new:
            try:
                cancelled += yield from cancel(job_id)
            except JobError as error:
                if error.code != "not_found":  # it was deleted since
                    raise


def _open_jobs(run: str, deadline: float | None = None) -> Steps[dict[str, Status]]:
    """The jobs of a run that have not ended, with their states."""
    found = yield from collect(
        find_jobs(Selection(OPEN, run), deadline), lambda one: (one.state.id, one.state.status)
    )
    return dict(found)


def _wait_for_ends(
    job_ids: Iterable[str], timeout: float | None, deadline: float | None
) -> Steps[None]:
    ends = Ends(job_ids, timeout, deadline)
    try:
        while (yield from ends.next()):
            pass
    finally:
        ends.close()


def check_run_id(run_id: str) -> str:
    """`run_id`, if it is a valid one. Raises InvalidRequest."""
    if not isinstance(run_id, str) or not keys.RUN_ID.fullmatch(run_id):
        raise invalid(
            "a run id has up to 100 letters, digits, '_', '-' and '.', and does not begin with "
            f"'.'; got {describe(run_id)}",
            "run",
        )
    return run_id
