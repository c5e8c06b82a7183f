"""Enqueues the rows of a data set, a bounded window at a time, until all are in Parquet.

What is done is in the files: a producer begins by reading them, and enqueues the rows that are in
none. One producer at a time holds the lease on a run; when it loses it, it begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, TypeVar

import redis

from jobs import keys
from jobs.api.score_request import ScoreRequest
from jobs.data_sets.source import ErrorRow, RequestRow, RowSource, SourceRow
from jobs.errors import InvalidRequest, JobError
from jobs.operations import CHAT, SCORE
from jobs.results.outbox import OutboxEntry, outbox_entry
from jobs.runs.packs import Pack, packs, place_of
from jobs.runs.row_set import RowSet
from jobs.runs.window import Window
from jobs.runs.written_rows import WrittenRows
from jobs.store.connection.connect import may_pass
from jobs.store.enqueue import Enqueued
from jobs.store.producer_lease import Holder, LeaseLost
from jobs.store.run_rows import RowJob, RowState, RunRows

CHUNK_BYTES = 8 * 2**20  # of requests that are enqueued at once
POLL_SECONDS = 0.1  # between two looks at Redis and the files
READING_SECONDS = 1.0  # the same while rows are read: they cost as much as a hundred rows and more
# Rows that wait for Parquet: at twice as many, workers claim no jobs. Rows that no job can run are
# read as fast as the file.
MAX_ENDED = 10_000
FULL_SECONDS = 0.5  # pause while a queue or Redis is full
OUTAGE_SECONDS = 0.5  # pause while Redis can't be reached

End = Literal["done", "stopped", "waited"]
Fault = redis.RedisError | JobError
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """In samples. done: those that have ended, also of earlier calls. total: of the data set, None
    until its end was read. tokens: generated, or scored, for rows in Parquet. fault: why rows can't
    be enqueued now, which is waited out."""

    done: int
    failed: int
    total: int | None
    running: int
    unwritten: int
    tokens: int
    fault: Fault | None = None


class Watcher(Protocol):
    """Sees what a producer does, and may stop it."""

    def update(self, progress: Progress) -> bool:
        """Called often. False: enqueue no more, and return when the rows that run have ended."""

    def waits_for(self, holder: Holder) -> None:
        """Another process enqueues the rows of this run."""


class Producer:
    """Runs one data set. `window`: rows whose jobs have not ended, at most."""

    def __init__(
        self,
        rows: RunRows,
        written: WrittenRows,
        source: RowSource,
        watcher: Watcher,
        *,
        window: int,
        begin: Callable[[], RowSet | None] = lambda: None,
        before_rows: Callable[[], None] = lambda: None,
    ) -> None:
        """`begin`: called with the lease, before the first row is enqueued; may raise. It returns
        the samples that are packed with no others, such as those that have failed before.
        `before_rows`: called each time before rows are enqueued or ended; may raise."""
        self._rows, self._written = rows, written
        self._source, self._watcher, self._size = source, watcher, window
        self._begin, self._before_rows = begin, before_rows
        self._window = Window(rows, written)
        self._alone = RowSet()
        self._total: int | None = None
        self._read = 0  # samples of this pass over the data set
        self._unread: InvalidRequest | None = None  # why it can't be read further
        self._going = True
        self._polled, self._poll_seconds = 0.0, 0.0  # end and duration of the last look

    @property
    def total(self) -> int | None:
        """Number of rows of the data set; None until its end was read."""
        return None if self._total is None else self._total // self._source.samples

    def run(self) -> End:
        """Return with the lease when each row is in a file, or when the watcher has stopped it;
        "waited": it was stopped while another process held the lease.

        Raises InvalidRequest if the data set can't be read to its end, when the rows before are in
        files, and JobError if rows can't be enqueued: rows in Redis go on then.
        """
        while True:
            try:
                if not self._acquire():
                    return "waited"
                self._alone = self._retry(self._begin) or self._alone
                while not self._pass():
                    if not self._going:
                        return "stopped"
                self._report()  # the total is known
                return "done"
            except LeaseLost:
                continue

    def confirm(self) -> None:
        """Raises LeaseLost if another process may have changed the run since `run` returned."""
        self._retry(self._rows.lease.renew)

    def _acquire(self) -> bool:
        """Wait for the lease. False if the watcher does not want to."""
        while (holder := self._retry(self._rows.lease.acquire)) is not None:
            self._watcher.waits_for(holder)
            self._written.refresh()
            if not self._report():
                return False
            time.sleep(1.0)
        self._window = Window(self._rows, self._written)
        self._written.clear()  # the holder before may have removed rows
        return True

    def _pass(self) -> bool:
        """Go through the data set once. True if all its rows are in files."""
        self._written.refresh()
        source = self._source.read(self._is_wanted)
        self._read, self._unread = 0, None
        at_end = False
        while True:
            self._tick()
            room = self._size - self._window.open
            is_full = self._window.ended >= MAX_ENDED
            if self._going and not (at_end or is_full) and room >= max(1, self._size // 2):
                chunk, at_end = self._take(source, room)
                self._send(chunk)
                if at_end and self._unread is None:
                    self._total = self._read
                continue
            if not self._going:
                self._retry(self._window.withdraw)
            if not len(self._window) and (at_end or not self._going):
                break
            if is_full or (self._window.ended and not self._window.open):
                self._retry(self._rows.want)
            time.sleep(POLL_SECONDS)
        if self._going and self._unread is not None:
            raise self._unread
        return at_end and self._written.rows.has_all(self._read)

    def _is_wanted(self, number: int) -> bool:
        return number not in self._written.rows and number not in self._window

    def _take(self, source: Iterator[SourceRow | None], count: int) -> tuple[list[SourceRow], bool]:
        """The next rows that are to be enqueued, and whether the data set has no more, or none that
        can be read."""
        chunk: list[SourceRow] = []
        size = 0
        while True:
            try:
                row = next(source)
            except StopIteration:
                return chunk, True
            except InvalidRequest as error:
                self._unread = error
                return chunk, True
            self._read += 1
            if not self._read & 0xFF:
                self._tick(READING_SECONDS)
            if row is not None:
                chunk.append(row)
                size += row.size if isinstance(row, RequestRow) else 0
            if len(chunk) >= count or size > CHUNK_BYTES or not self._going:
                return chunk, False

    def _send(self, chunk: list[SourceRow]) -> None:
        """Enqueue rows, those with a common beginning one after the other, so that workers compute
        it once. Rows that no job runs are ended."""
        if chunk:
            self._retry(self._before_rows)
        self._end([row for row in chunk if isinstance(row, ErrorRow)])
        left = sorted((row for row in chunk if isinstance(row, RequestRow)), key=place_of)
        while left := self._without_owners(left):
            sent = [*packs(left, self._alone.__contains__)]
            requests = [pack.request for pack in sent]
            found = self._retry(lambda sent=requests: self._rows.enqueue(sent))  # type: ignore[misc]
            again = [
                pack for pack, one in zip(sent, found, strict=True) if not self._took(pack, one)
            ]
            if again:
                self._tick(fault=next(filter(_is_full, found), None))
                time.sleep(FULL_SECONDS)
            left = [row for pack in again for row in pack.rows] if self._going else []

    def _without_owners(self, rows: list[RequestRow]) -> list[RequestRow]:
        """The rows that no scoring job has. A job of an earlier call may have packed them with
        others than this call would, and gives the same rows."""
        scored = {row.number: row for row in rows if isinstance(row.request, ScoreRequest)}
        requests = [row.request for row in scored.values() if isinstance(row.request, ScoreRequest)]
        found = self._retry(lambda: self._rows.owners(requests)) if requests else []
        owners = dict(zip(scored, found, strict=True))
        for number, owner in owners.items():
            if owner is None:
                continue
            row = scored[number]
            if not (owner.is_same or owner.has_ended):
                raise self._taken(row, f"row {row.row} is taken by another request")
            add = self._window.add_ended if owner.has_ended else self._window.add
            add(number, self._row_job(row, owner.job_id))
        return [row for row in rows if owners.get(row.number) is None]

    def _row_job(self, row: RequestRow, job_id: str) -> RowJob:
        queue = keys.queue(row.request.model, row.request.job.priority)
        return RowJob(row.row, row.repeat, job_id, queue)

    def _took(self, pack: Pack, found: Enqueued | JobError) -> bool:
        """False if the rows must be sent again: a queue is full, or a row of several is refused."""
        if isinstance(found, Enqueued):
            add = self._window.add_ended if found.ended_before else self._window.add
            for row in pack.rows:
                add(row.number, self._row_job(row, found.id))
            return True
        if _is_full(found):
            return False
        if len(pack.rows) > 1:
            for row in pack.rows:
                self._alone.add(row.number)
            return False
        (row,) = pack.rows
        if found.param == "job.row":
            self._refuse_taken(row, found)
        else:
            self._end([row.refused(found)])
        return True

    def _refuse_taken(self, row: RequestRow, error: JobError) -> None:
        """Another request has the row. If its job has ended, it is on its way to Parquet, or the
        files have lost it. Raises JobError if the job may run."""
        one = self._row_job(row, "")
        if self._retry(lambda: self._rows.states([one])) == [RowState.OPEN]:
            raise self._taken(row, error.message.partition(":")[2].strip())
        self._window.add_ended(row.number, one)

    def _taken(self, row: RequestRow, fact: str) -> JobError:
        return JobError(
            "invalid_request",
            f"{row.place}: {fact}; Redis still has jobs of an earlier run of this name: "
            f"chatjobs jobs cancel --run {self._rows.run} ends them",
        )

    def _end(self, rows: list[ErrorRow]) -> None:
        """Write error rows."""
        entries = [self._entry(row) for row in rows]
        written = self._retry(lambda: self._rows.end(entries))
        for row, is_written in zip(rows, written, strict=True):
            # A request that was enqueued before had no error then.
            add = self._window.add_ended if is_written else self._window.add
            add(row.number, RowJob(row.row, row.repeat, self._id_of(row), ""))

    def _entry(self, row: ErrorRow) -> OutboxEntry:
        error = row.error.to_dict()
        of_run = {"run": self._rows.run, "row": row.row, "repeat": row.repeat}
        request = {**row.fields, "job": {**row.fields.get("job", {}), **of_run}}
        return outbox_entry(
            self._id_of(row),
            request,
            "error",
            operation=(SCORE if "items" in request else CHAT).name,
            attempt=0,
            error={**error, "message": f"{row.place}: {error['message']}"},
            finished_at=time.time(),
        )

    def _id_of(self, row: ErrorRow) -> str:
        """The id in the row of a sample that no job has run."""
        return f"{row.number}-{self._rows.run.replace('.', '_')}"

    def _tick(self, seconds: float = POLL_SECONDS, fault: Fault | None = None) -> None:
        """Look at Redis and the files, and report, `seconds` after the last time, or later if that
        takes long. Raises LeaseLost."""
        self._rows.lease.check()
        begin = time.monotonic()
        if begin < self._polled + max(seconds, 4 * self._poll_seconds):
            return
        self._retry(self._window.poll)
        self._report(fault)
        self._polled = time.monotonic()
        self._poll_seconds = self._polled - begin

    def _report(self, fault: Fault | None = None) -> bool:
        written, window = self._written, self._window
        progress = Progress(
            done=len(written.rows) + window.ended,
            failed=len(written.failed),
            total=self._total,
            running=window.open,
            unwritten=window.ended,
            tokens=written.tokens,
            fault=fault,
        )
        self._going = self._watcher.update(progress) and self._going
        return self._going

    def _retry(self, call: Callable[[], T]) -> T:
        """The reply of Redis, however long it is full, takes no writes or can't be reached, unless
        the watcher stops."""
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not may_pass(error) or not self._report(error):
                    raise
                time.sleep(OUTAGE_SECONDS)


def _is_full(found: Enqueued | JobError) -> TypeGuard[JobError]:
    """True if a request was refused because its queue, or Redis, is full."""
    return isinstance(found, JobError) and found.code == "queue_full"
