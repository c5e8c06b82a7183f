"""Attempts at jobs on the real store: claims, streams, returns and ends jobs as a worker does.

Every change in Redis is a transition of `jobs.store`. Of a worker, this leaves out what needs other
processes or a model: the renewal of leases, the reaper, the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from redis import Redis

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.errors import JobError
from jobs.results import outbox
from jobs.store.claimed_job import ClaimedJob
from jobs.store.job_store import JobStore
from jobs.store.part_plans import Look, PartPlans
from jobs.store.rq_layout import queue_names
from jobs.store.settlement import failed_attempts, settlement_of
from jobs.store.stream import StreamWriter
from jobs.store.workers import worker_key
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry

WORKER = "fake-worker"
ROOM = 1_000_000  # jobs that run at the same time
PLAN_SECONDS = 60.0  # until another recorder may write the rows of a plan
ALL_ROWS = 1_000_000


class Attempts:
    """Starts, streams and ends the jobs of all models in one Redis."""

    def __init__(self, redis: Redis) -> None:
        self._client = redis
        self._writer = StreamWriter(redis)
        self._plans = PartPlans(redis, WORKER, PLAN_SECONDS)
        self._models: list[str] = []  # the store follows it
        self._store = JobStore(redis, self._models, WORKER, worker_key(WORKER))

    @property
    def store(self) -> JobStore:
        """The store of all models that have queues now."""
        queues = [name for name in queue_names(self._client) if keys.is_queue(name)]
        self._models[:] = sorted({keys.model_of(queue) for queue in queues})
        return self._store

    def claim(self) -> list[ClaimedJob]:
        """Take all jobs that wait, with the scheduled ones whose time has come: interactive ones
        first, then in the order of submission."""
        store = self.store
        if not store.any_waiting():
            return []
        claimed = store.claim(lambda model, bulk: ROOM).jobs
        return sorted(claimed, key=lambda job: (keys.is_bulk(job.lease.queue), job.enqueued_at))

    def next_due(self) -> float:
        """Seconds until the next scheduled job is due; infinity if there is none."""
        return max(0.0, self.store.next_due() - time.time())

    def cancelled(self, jobs: Sequence[ClaimedJob]) -> list[bool]:
        """True for each job that a client has asked to stop."""
        checked = self._store.leases.check([job.lease for job in jobs])
        return [cancelled for _, cancelled in checked]

    def write(self, job: ClaimedJob, seq: int, deltas: Sequence[Delta]) -> bool:
        """Append an entry to the token stream. False if the stream belongs to a later attempt."""
        entry = Entry(job.lease.job, job.lease.attempt, seq, tuple(deltas))
        return self._writer.write_many([entry])[0]

    def retry(self, job: ClaimedJob, allowed: int, error: JobError) -> bool:
        """Return the job to the end of its queue after an error. False if no retry is left."""
        return self._store.leases.retry(
            job.lease, allowed, 0.0, failed_attempts(job, error, WORKER)
        )

    def finish(self, job: ClaimedJob, completion: ChatCompletion) -> None:
        """End the job with its answer."""
        self._end(job, completion, None)

    def fail(self, job: ClaimedJob, error: JobError, partial: ChatCompletion | None = None) -> None:
        """End the job with an error; `partial` is what it had generated."""
        self._end(job, partial, error)

    def take_rows(self) -> list[outbox.OutboxEntry]:
        """Take the entries of ended jobs out of all outboxes, as a recorder does."""
        taken: list[outbox.OutboxEntry] = []
        looks = [Look(run, 1, 0.0) for run in self._plans.runs()]
        while looks:
            plans = self._plans.next(looks, max_rows=ALL_ROWS, max_bytes=2**53)
            for plan in plans:
                taken += [outbox.decode(row) for row in self._plans.rows(plan) if row is not None]
                self._plans.commit(plan)
            looks = looks if plans else []
        return taken

    def _end(self, job: ClaimedJob, answer: ChatCompletion | None, error: JobError | None) -> None:
        settlement = settlement_of(job, answer, error, worker=WORKER, started_at=job.claimed_at)
        self._store.settle([settlement])
