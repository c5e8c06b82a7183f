"""Says on stderr what a job waits for, or the rows of runs, when nothing has come for a while."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from jobs.cli.output import echo
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Job
    from jobs.store.backlog import Unwritten
    from jobs.store.connection.protocol import Connection

PATIENCE_SECONDS = 1.5  # before the first notice, and between two looks
REPEAT_SECONDS = 60.0  # between two notices that differ in their numbers alone
_NUMBERS = re.compile(r"[0-9.]+")  # the age of rows, the place in a queue: they change all the time

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of runs, on their way to Parquet."""

    runs: tuple[str, ...]


class Notices:
    """Knows which of the notices about a wait are news: one with another reason than the notice
    before, and every minute one in which only numbers have changed."""

    def __init__(self) -> None:
        self._last, self._written_at = "", 0.0  # monotonic

    def is_news(self, text: str) -> bool:
        """True if the notice is to be written, which then counts as written."""
        if not text or text == self._last:
            return False
        another = _NUMBERS.sub("", text) != _NUMBERS.sub("", self._last)
        if not another and time.monotonic() - self._written_at < REPEAT_SECONDS:
            return False
        self._last, self._written_at = text, time.monotonic()
        return True


class WaitNotice:
    """Watches one job at a time, or rows, from a thread of its own, and writes notices that are
    news; says nothing with `quiet`."""

    def __init__(
        self, connection: Connection, *, quiet: bool, write: Callable[[str], None] | None = None
    ) -> None:
        self._connection, self._quiet = connection, quiet
        self._write = write or (lambda text: echo(text, err=True))
        self._job: Job[Any, Any] | Rows | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # `watch` returns when no notice is being written
        self._notices = Notices()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.watch(None)

    def watch(self, job: Job[Any, Any] | Rows | None) -> None:
        """From now on say what `job` waits for, or why rows wait; None: nothing."""
        with self._lock:
            self._job = job

    def until_first(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; the first one ends the watch."""
        for item in items:
            if self._job is not None:
                self.watch(None)
            yield item

    def _run(self) -> None:
        while not self._ended.wait(PATIENCE_SECONDS):
            job = self._job
            if job is None:
                continue
            text = ""
            with suppress(Exception):  # the command itself reports that Redis fails
                if isinstance(job, Rows):
                    text = reason_of_rows(self._connection, job)
                else:
                    text = reason(self._connection, job)
            with self._lock:
                if self._job is job and self._notices.is_news(text):
                    self._write(text)


def reason_of_rows(connection: Connection, rows: Rows) -> str:
    """Return why rows are not written yet; "" if they are."""
    from jobs.store.backlog import any_records, read_unwritten, recording_faults
    from jobs.store.worker_status import read_recorders, read_workers

    waiting = read_unwritten(connection.redis, rows.runs)
    if not waiting.count:
        return ""
    processes = [*read_workers(connection.redis), *read_recorders(connection.redis)]
    if not any_records(processes):
        return (
            f"{rows_wait(waiting)}: no running worker writes rows (chatjobs work, or chatjobs "
            "record, with --results DIR)"
        )
    faults = recording_faults(processes)
    if faults:
        return f"{rows_wait(waiting)}: {'; '.join(sorted(set(faults.values())))}"
    return f"the rows of {', '.join(waiting.runs)} are being written"


def rows_wait(rows: Unwritten) -> str:
    """The number of unwritten rows, and the age of the first one."""
    if not rows.count:
        return "none wait now"
    wait = f"{counted(rows.count, 'row')} {'waits' if rows.count == 1 else 'wait'}"
    where = f"of run {min(rows.runs)}" if len(rows.runs) == 1 else f"of {len(rows.runs)} runs"
    return f"{wait} in Redis, {where}, the first one for {rows.oldest:.0f} s"


def reason(connection: Connection, job: Job[Any, Any]) -> str:
    """Return what a job waits for; "" if it has ended."""
    from jobs.client.cause import what_it_waits_for
    from jobs.store.connection.protocol import run_sync

    if job.status() == "started":
        return f"job {job.id} is running: its first token has not come yet"
    return run_sync(what_it_waits_for(job.id, f"job {job.id}"), connection)
