"""Runs one batch, from its check to its files. The process that holds the lease on its run does.

Any process may begin where another one ended: what is known of a batch is on the disk, in the files
of its run and in Redis, and each step can be made again.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from jobs.api.wire import describe
from jobs.client.client import Client
from jobs.client.run import cancel_run, count_jobs
from jobs.errors import InvalidRequest, JobError
from jobs.gateway.batches.lines import MAX_ERRORS, BatchRows, Checked, Fault, check_lines
from jobs.gateway.batches.output import write_files
from jobs.gateway.batches.stored import (
    ENDED,
    FINALIZING,
    IN_PROGRESS,
    Outcome,
    StoredBatch,
)
from jobs.gateway.files.stored import FileStore
from jobs.gateway.ids import FILE, new_id
from jobs.gateway.served import listed
from jobs.results.files import Results
from jobs.runs.audit import Audit
from jobs.runs.data_set_run import DataSetRun
from jobs.runs.producer import Progress
from jobs.store.connection.protocol import run_sync
from jobs.store.producer_lease import Holder, ProducerLease
from jobs.store.run_rows import RunRows
from jobs.store.worker_status import WorkerStatuses, read_statuses

WINDOW_ROWS = 1000  # in Redis at once that have not ended
SHOW_SECONDS = 1.0  # between two writes of the progress, and looks at whether it is cancelled
POLL_SECONDS = 0.5
SILENT_SECONDS = 60.0  # that a live worker with a busy loop may take to publish again
LOOKS = 2  # that find no job: one that a worker returns to its queue may be missed once

logger = logging.getLogger(__name__)


class Left(Exception):
    """This process ends, and another one goes on."""


class BatchRun:
    """One batch in this process. `leaving`: set when the process ends."""

    def __init__(
        self, batch: StoredBatch, client: Client, results: Results, leaving: threading.Event
    ) -> None:
        self._batch, self._client, self._results = batch, client, results
        self._leaving = leaving
        self._lease = ProducerLease(client.redis, batch.run)
        self._faults: list[Fault] = []

    def go_on(self) -> None:
        """Return when the batch has ended, or if another process has it. Raises Left, LeaseLost,
        OSError, redis.RedisError, and JobError: it is to be called again then."""
        if self._lease.acquire() is not None:
            return
        with self._lease:
            batch = self._batch
            if batch.has(ENDED):
                return
            if not batch.has(FINALIZING):
                outcome = self._end_rows()
                if outcome is None:
                    return
                self._lease.renew()
                ids = {f"{kind}_file_id": new_id(FILE) for kind in ("output", "error")}
                faults = [fault.to_dict() for fault in self._faults]
                batch.note(FINALIZING, outcome=outcome, faults=faults, **ids)
            self._finish()

    def _end_rows(self) -> Outcome | None:
        """How the batch ends, when no row of it is on its way; None if it has ended, or another
        process has it."""
        batch = self._batch
        if batch.stops_as is None and not batch.has(IN_PROGRESS) and not self._begin():
            return None
        if batch.stops_as is None:
            watcher = _Watcher(batch, self._client, self._leaving)
            try:
                end = self._run().execute(watcher)
            except InvalidRequest as error:
                self._faults = [Fault(error.code, error.message, error.param)]
                self._withdraw()
                return "failed"
            if end == "waited":
                return None
            if isinstance(end, Audit):
                if not end.holds:
                    logger.error("batch %s: the rows are not those of its input: %s", batch.id, end)
                return "completed"
        if not batch.has(IN_PROGRESS):
            checked = check_lines(batch.input, batch.asked.endpoint)
            if not self._note(checked):
                return None
        self._withdraw()
        return batch.stops_as or "cancelled"

    def _begin(self) -> bool:
        """Check the input. False if the batch has failed by it."""
        batch = self._batch
        checked = check_lines(batch.input, batch.asked.endpoint)
        if not checked.faults:
            checked.faults += self._unserved(checked.models)
        return self._note(checked)

    def _note(self, checked: Checked) -> bool:
        self._lease.renew()
        if checked.faults:
            self._fail(checked.faults)
            return False
        model = checked.models[0] if len(checked.models) == 1 else None
        self._batch.note(IN_PROGRESS, total=checked.total, model=model)
        return True

    def _fail(self, faults: list[Fault]) -> None:
        errors = {"object": "list", "data": [fault.to_dict() for fault in faults]}
        self._batch.note(ENDED, status="failed", errors=errors)
        logger.info("batch %s has failed: %s", self._batch.id, faults[0].message)

    def _unserved(self, models: list[str]) -> list[Fault]:
        """Models that no worker serves, while others are served. Without any worker, rows wait.
        Workers that publish nothing now are waited for: after an outage they come back one by
        one. Raises Left."""
        deadline = time.monotonic() + SILENT_SECONDS
        while True:
            workers = read_statuses(self._client.redis)
            faults = _faults_of(models, workers)
            if not faults or not workers.silent or time.monotonic() > deadline:
                return faults
            if self._leaving.wait(POLL_SECONDS):
                raise Left
            self._lease.renew()

    def _run(self) -> DataSetRun:
        batch, asked = self._batch, self._batch.asked
        source = BatchRows(batch.input, asked.endpoint, batch.tenant, batch.run)
        started = batch.fact(IN_PROGRESS) or {}
        configuration = {
            "mode": "chat",
            "model": started.get("model"),
            "data set": {"content": asked.input_file_id},
            "limit": None,
        }
        return DataSetRun(
            self._client.redis,
            self._results,
            batch.run,
            source,
            configuration,
            window=WINDOW_ROWS,
            expected=started.get("total"),
            lease=self._lease,
        )

    def _withdraw(self) -> None:
        """Cancel what is on its way, and return when its rows are in files."""
        connection, run = self._client.connection, self._batch.run
        rows = RunRows(self._client.redis, self._lease)
        looks = 0
        while looks < LOOKS:
            self._lease.check()
            run_sync(cancel_run(run), connection)
            found = run_sync(count_jobs(run), connection)
            looks = 0 if found.queued or found.running or found.unwritten else looks + 1
            if found.unwritten:
                rows.want()
            if self._leaving.wait(POLL_SECONDS):
                raise Left

    def _finish(self) -> None:
        batch = self._batch
        finalizing = batch.known(FINALIZING)
        files = FileStore(self._results.root, batch.tenant)
        try:
            written = write_files(batch, self._results, files, finalizing)
        except InvalidRequest as error:  # rows of other jobs are in its run
            self._fail([Fault(error.code, error.message, error.param)])
            return
        self._lease.renew()
        faults = finalizing["faults"]
        batch.note(
            ENDED,
            status=finalizing["outcome"],
            errors={"object": "list", "data": faults} if faults else None,
            output_file_id=written.output_file_id,
            error_file_id=written.error_file_id,
            completed=written.completed,
            failed=written.failed,
            usage=written.usage,
        )
        logger.info(
            "batch %s has ended as %s: %d completed, %d failed",
            batch.id,
            finalizing["outcome"],
            written.completed,
            written.failed,
        )


class _Watcher:
    """Shows the progress of a batch, and stops it."""

    def __init__(self, batch: StoredBatch, client: Client, leaving: threading.Event) -> None:
        self._batch, self._client, self._leaving = batch, client, leaving
        self._next = 0.0
        self._shown: tuple[int, int] | None = None
        self._stops = self._lost = False

    def update(self, progress: Progress) -> bool:
        if self._leaving.is_set():
            raise Left
        now = time.monotonic()
        if now < self._next:
            return not (self._stops or self._lost)
        self._next = now + SHOW_SECONDS
        counts = progress.done - progress.unwritten - progress.failed, progress.failed
        if counts != self._shown:
            with suppress(OSError):
                self._batch.show_progress(*counts)
            self._shown = counts
        if self._stops and progress.running:  # those that wait were taken out of their queue
            with suppress(JobError):
                run_sync(cancel_run(self._batch.run), self._client.connection)
        self._stops = self._batch.stops_as is not None
        return not (self._stops or self._lost)

    def waits_for(self, holder: Holder) -> None:
        self._lost = True


def _faults_of(models: list[str], workers: WorkerStatuses) -> list[Fault]:
    known = workers.served | {
        name
        for worker in (*workers.running, *workers.loading)
        for names in worker.get("loading", {}).values()
        for name in names
    }
    unserved = [name for name in models if known and name not in known]
    return [
        Fault(
            "model_not_found",
            f"the model {describe(name)} does not exist: models served now: "
            f"{listed(sorted(known))}",
            "model",
        )
        for name in unserved[:MAX_ERRORS]
    ]
