"""Waiting for many jobs over one connection: for their ends, and for their rows in Parquet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.api.request import ChatRequest
from jobs.client.rq_format import CHANGING_FIELDS, job_key, results_key
from jobs.client.state import JobState, Status, parse_state, read_outcome, read_state, unknown
from jobs.client.steps import Call, Connection, Emit, Emitting, Steps, command, retry
from jobs.client.wait import BLOCK_SECONDS
from jobs.errors import JobError
from jobs.results.outbox import DEFAULT_RUN, run_of

WINDOW = 200  # results streams in one XREAD
BATCH = 500  # jobs in one pipeline
ROWS_SECONDS = 0.1  # between two looks at an outbox


class Ends:
    """Jobs that are waited for. XREAD blocks on a window of them; after a silence, the window moves
    on, so that jobs which are stuck don't hide the others."""

    def __init__(self, job_ids: Iterable[str], timeout: float | None) -> None:
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self._timeout = timeout
        self._unread: deque[str] = deque(dict.fromkeys(job_ids))
        self._total = len(self._unread)
        self._outside: deque[str] = deque()  # read, and not in the window
        self._window: dict[str, str] = {}  # job: id of its newest result when it was read
        self._last = Status.UNKNOWN  # status of a job that had not ended

    def next(self) -> Steps[list[JobState]]:
        """The jobs that have ended since the last call, at least one; empty if all have.

        A job that Redis does not know counts as ended. Raises JobError `timeout`.
        """
        while self._unread:
            ids = [self._unread.popleft() for _ in range(min(BATCH, len(self._unread)))]
            ended, waiting = yield from self._read(ids)
            self._outside.extend(waiting)
            if ended:
                return ended
        while self._outside or self._window:
            free = WINDOW - len(self._window)
            due = [self._outside.popleft() for _ in range(min(free, len(self._outside)))]
            while not due:
                due = yield from self._wait()
            ended, waiting = yield from self._read(due)
            self._window.update(waiting)
            if ended:
                return ended
        return []

    def _read(self, ids: Sequence[str]) -> Steps[tuple[list[JobState], dict[str, str]]]:
        """The jobs that have ended; the others with the id of their newest result."""
        replies = yield from retry(_read_many(ids), self.deadline)
        newest, states = replies[: len(ids)], replies[len(ids) :]
        ended, waiting = [], {}
        for job_id, entries, values in zip(ids, newest, states, strict=True):
            state = parse_state(job_id, CHANGING_FIELDS, values)
            if state.status.over or state.status is Status.UNKNOWN:
                self._window.pop(job_id, None)
                ended.append(state)
            else:
                waiting[job_id] = entries[0][0].decode() if entries else "0-0"
                self._last = state.status
        return ended, waiting

    def _wait(self) -> Steps[list[str]]:
        """The jobs of the window that have a new result, or all of them after a silence."""
        seconds = BLOCK_SECONDS
        if self.deadline is not None:
            seconds = min(seconds, self.deadline - time.monotonic())
            if seconds <= 0:
                raise self._timed_out()
        streams = {results_key(job_id): since for job_id, since in self._window.items()}
        wait = command("xread", streams, block=max(1, int(seconds * 1000)))
        replies = yield from retry(wait, self.deadline)
        if replies:
            changed = {stream.decode() for stream, _ in replies}
            return [job_id for job_id in self._window if results_key(job_id) in changed]
        due = [*self._window]
        if self._outside:
            self._outside.extend(due)
            self._window.clear()
            due = [self._outside.popleft() for _ in range(min(WINDOW, len(self._outside)))]
        return due

    def _timed_out(self) -> JobError:
        ids = [*self._window, *self._outside]
        return JobError(
            "timeout",
            f"{len(ids)} of {self._total} jobs have not ended after {self._timeout:g} s (such as "
            f"{ids[0]}; status: {self._last.value}); they are not cancelled, and can be waited "
            "for again",
        )


def follow_ends(job_ids: Iterable[str], timeout: float | None) -> Emitting[str]:
    """Emits each job when it has ended."""
    ends = Ends(job_ids, timeout)
    while ended := (yield from ends.next()):
        for state in ended:
            yield Emit(state.id)


def gather_outcomes(
    job_ids: Sequence[str], timeout: float | None, keep_errors: bool
) -> Steps[list[ChatCompletion | JobError]]:
    """The outcomes in the order of the ids. Raises the first error, unless `keep_errors`."""
    ends = Ends(job_ids, timeout)
    outcomes: dict[str, ChatCompletion | JobError] = {}
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
    return [outcomes[job_id] for job_id in job_ids]


def wait_for_rows(requests: Mapping[str, ChatRequest | None], timeout: float | None) -> Steps[None]:
    """Return when the rows of the jobs are in Parquet. `requests`: by job id, None if not known.

    Raises JobError `timeout`, which says whether jobs or rows are missing.
    """
    ends = Ends(requests, timeout)
    while ended := (yield from ends.next()):
        for state in ended:
            if state.status is Status.UNKNOWN:
                raise unknown(state.id)
    runs: dict[str, None] = {}
    for job_id, request in requests.items():
        if request is None:
            state = yield from read_state(job_id, full=True, deadline=ends.deadline)
            runs[run_of(state.request)] = None
        else:
            runs[request.job.run or DEFAULT_RUN] = None
    for run in runs:
        yield from _wait_for_outbox(run, timeout, ends.deadline)


def _wait_for_outbox(run: str, timeout: float | None, deadline: float | None) -> Steps[None]:
    """Return when the rows that are in the outbox now have left it: they are in a file then."""
    key = keys.outbox(run)
    last = yield from retry(command("xrevrange", key, count=1), deadline)
    if last:
        yield from retry(command("sadd", keys.WANTED, run), deadline)
    while last:
        first = yield from retry(command("xrange", key, count=1), deadline)
        if not first or _position(first[0][0]) > _position(last[0][0]):
            return
        if deadline is not None and time.monotonic() >= deadline:
            count = yield from retry(command("xlen", key), deadline)
            raise JobError(
                "timeout",
                f"the jobs have ended, but {count} rows of run {run!r} are not in Parquet after "
                f"{timeout:g} s: they are in Redis until a worker writes them; chatjobs status "
                "lists the workers",
            )
        yield lambda connection: connection.sleep(ROWS_SECONDS)


def _read_many(ids: Sequence[str]) -> Call:
    """The newest result and the state of each job. The results are read first: XREAD then returns
    for any later one."""

    def call(connection: Connection) -> Any:
        pipeline = connection.redis.pipeline(transaction=False)
        for job_id in ids:
            pipeline.xrevrange(results_key(job_id), count=1)
        for job_id in ids:
            pipeline.hmget(job_key(job_id), CHANGING_FIELDS)
        return pipeline.execute()

    return call


def _position(entry_id: bytes) -> tuple[int, int]:
    milliseconds, number = entry_id.split(b"-")
    return int(milliseconds), int(number)
