"""Progress of `chatjobs run` while rows run, and the reason of a standstill."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from jobs.cli.failures import Unavailable
from jobs.cli.waiting import Notices, Rows, reason_of_rows
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs import Client, Results
    from jobs.cli.progress import RunProgress
    from jobs.runs.producer import Progress
    from jobs.store.producer_lease import Holder

# Without a row that ends, before the first notice of the reason, and between two looks.
QUIET_SECONDS = 3.0
FIRST_FAILURES = 100  # rows that must have ended before a rate of errors stops a run


class Stop:
    """The reason for which a run stops before its end; None while it goes on."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.interrupted = False

    def interrupt(self) -> bool:
        """Stop by Ctrl-C. False if the run stops already: Ctrl-C again does not wait."""
        if self.reason:
            return False
        self.reason, self.interrupted = "interrupted", True
        return True


class RunWatcher:
    """Shows the progress of a producer, says why there is none, and ends it at a rate of errors."""

    def __init__(
        self,
        connected: Client,
        store: Results,
        name: str,
        models: tuple[str, ...],
        progress: RunProgress,
        stop: Stop,
        *,
        total: int,
        max_error_rate: float | None,
        unserved: str = "",
    ) -> None:
        """models: of the rows, as far as they are known. total: rows of the data set, about.
        unserved: what to do if nobody serves a model."""
        self._connected, self._store = connected, store
        self._name, self._models = name, models
        self._progress, self._stop = progress, stop
        self._total, self._max_error_rate = total, max_error_rate
        self._unserved = unserved
        self._is_stopped = False  # the producer knows that the run stops
        self._done = -1
        self._look_at = 0.0  # monotonic: when to look for a reason
        self._notices = Notices()

    def update(self, progress: Progress) -> bool:
        from redis import RedisError

        self._progress.update(
            progress.done, progress.total or self._total, progress.tokens, progress.failed
        )
        now = time.monotonic()
        if progress.done != self._done:
            self._done, self._look_at = progress.done, now + QUIET_SECONDS
        elif now >= self._look_at:
            self._look_at = now + QUIET_SECONDS
            self._say(self._reason(progress))
            if progress.fault is None:
                with suppress(RedisError):  # workers may have begun with another folder
                    check_folder(self._connected, self._store)
        self._check_rate(progress)
        if self._is_stopped and progress.running:  # without those that it took out of the queue
            self._say(
                f"{self._stop.reason}: waiting for {counted(progress.running, 'row')} that run; "
                "Ctrl-C again does not wait"
                if self._stop.interrupted
                else f"{self._stop.reason}: waiting for the rows that run"
            )
        self._is_stopped = self._stop.reason is not None
        return not self._is_stopped

    def waits_for(self, holder: Holder) -> None:
        self._say(
            f"{holder} enqueues the rows of run {self._name}: waiting until it has ended, or has "
            "been silent for 15 s"
        )

    def _check_rate(self, progress: Progress) -> None:
        rate = self._max_error_rate
        if rate is None or self._stop.reason or progress.done < FIRST_FAILURES:
            return
        if progress.failed > rate * progress.done:
            self._stop.reason = (
                f"{progress.failed:,} of {progress.done:,} rows have failed, more than "
                f"--max-error-rate {rate:g}"
            )

    def _reason(self, progress: Progress) -> str:
        """Why no row ends; "" if there is no reason that is known."""
        from jobs.client.serving import nobody_serves
        from jobs.errors import JobError
        from jobs.store.connection.connect import redis_failure
        from jobs.store.worker_status import read_statuses

        if progress.fault is not None:
            fault = progress.fault
            if not isinstance(fault, JobError):
                fault = redis_failure(self._connected.redis, fault)
            return f"{fault.message}: trying again"
        with suppress(Exception):  # the producer itself meets the faults of Redis
            if progress.running:
                workers = read_statuses(self._connected.redis)
                for model in self._models:
                    if model not in workers.served:
                        waits = "the run waits until one does"
                        return f"{nobody_serves(model, workers)}: {waits}{self._unserved}"
            elif progress.unwritten:
                return reason_of_rows(self._connected.connection, Rows((self._name,)))
        return ""

    def _say(self, text: str) -> None:
        if self._notices.is_news(text):
            self._progress.note(text)


def check_all_score(connected: Client, models: Iterable[str]) -> None:
    """Refuse to score with models that workers serve which run no scoring jobs."""
    from jobs.operations import SCORE
    from jobs.store.worker_status import read_statuses

    workers = read_statuses(connected.redis)
    for model in models:
        others = workers.without(model, SCORE.func)
        if others:
            raise Unavailable(
                f"{counted(len(others), 'worker')} that serve{'s' * (len(others) == 1)} {model!r} "
                f"can't score ({', '.join(others)}): update chatjobs there, or stop them; those "
                "with --upstream never can"
            )


def check_folder(connected: Client, store: Results) -> None:
    """Refuse a folder that the workers of this Redis do not write to."""
    from jobs.store.results_folder import read_id, read_record

    record = read_record(connected.redis)
    if record is None or record.id == read_id(store.root):
        return
    raise Unavailable(
        f"{store.root.absolute()} is not the results folder of the workers on this Redis, which is "
        f"{record.path} on {record.host}: select that folder with --results DIR, on a disk that "
        "this machine shares"
    )
