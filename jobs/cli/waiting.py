"""Says on stderr what a job waits for, when nothing has come from it for a while."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Self, TypeVar

from jobs.cli.answer import counted
from jobs.cli.output import echo

if TYPE_CHECKING:
    from jobs import Job
    from jobs.client.steps import Connection

PATIENCE_SECONDS = 1.5  # before the first notice, and between two looks

Item = TypeVar("Item")


class WaitNotice:
    """Watches one job at a time, from a thread of its own; says nothing with `quiet`.

    A notice is written when the reason of the wait has changed.
    """

    def __init__(
        self, connection: Connection, *, quiet: bool, write: Callable[[str], None] | None = None
    ) -> None:
        self._connection, self._quiet = connection, quiet
        self._write = write or (lambda text: echo(text, err=True))
        self._job: Job | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()  # `watch` returns when no notice is being written
        self._last = ""
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        if not self._quiet:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.watch(None)

    def watch(self, job: Job | None) -> None:
        """From now on say what `job` waits for; None: nothing."""
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
                text = reason(self._connection, job)
            with self._lock:
                if text and text != self._last and self._job is job:
                    self._last = text
                    self._write(text)


def reason(connection: Connection, job: Job) -> str:
    """Return what a job waits for; "" if it has ended."""
    from jobs import keys
    from jobs.cli.status import workers
    from jobs.client.rq_format import queue_key, scheduled_key
    from jobs.client.state import read_state
    from jobs.client.steps import run_sync
    from jobs.client.turns import session_of

    redis = connection.redis
    state = run_sync(read_state(job.id, full=True), connection)
    if state.status == "started":
        return f"job {job.id} is running: its first token has not come yet"
    if state.status == "scheduled":
        due = redis.zscore(scheduled_key(state.queue), job.id)
        if due is None:  # queued since its state was read
            return ""
        moment = datetime.fromtimestamp(due).astimezone()
        return f"job {job.id} is scheduled for {moment:%Y-%m-%d %H:%M:%S %z}"
    options = state.request.get("job")
    if state.status == "deferred":
        session = session_of(state.request)
        before = redis.lpos(keys.open_turns(session), job.id)
        if not isinstance(before, int):
            return f"job {job.id} waits for other jobs"
        return f"job {job.id} waits for {counted(before, 'other turn')} of session {session!r}"
    if state.status != "queued":
        return ""
    model = state.queue.partition(":")[2]
    if not any(model in worker["names"] for worker in workers(redis)):
        return (
            f"no worker serves {model!r}: waiting for one to start or to finish loading "
            f"(chatjobs work --model {model})"
        )
    tenant = options.get("tenant") if isinstance(options, dict) else None
    waiting = keys.tenant_queue(state.queue, tenant) if tenant else queue_key(state.queue)
    ahead = redis.lpos(waiting, job.id)
    if not isinstance(ahead, int):  # claimed since its state was read
        return ""
    whose = f" of tenant {tenant!r}" if tenant else ""
    if ahead == 0:
        return f"job {job.id} is the next one{whose} for {model!r}"
    return f"job {job.id} is queued behind {counted(ahead, 'other job')}{whose} for {model!r}"
