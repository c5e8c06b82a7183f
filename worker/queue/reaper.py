"""Returns the jobs of dead workers to their queues, and fails those that keep killing workers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace

import redis

from jobs.errors import JobError
from jobs.results.failures import Failure, add_failure, failure
from jobs.store.claimed_job import Lease
from jobs.store.damage import Damaged
from jobs.store.job_store import JobStore
from jobs.store.leases import Leases, StartedJob
from jobs.store.workers import DeadWorker, Workers
from worker.queue.attempt import SettlementBuilder, worker_lost
from worker.queue.failure_detector import FailureDetector

logger = logging.getLogger(__name__)

MAX_LOST = 3  # deaths of workers after which a job that ran alone fails
SUSPECT_LOST = 2  # deaths of workers after which a job runs in quarantine


class Reaper:
    """Works in the name of one worker. Of several that see a worker dead, one is elected."""

    def __init__(
        self,
        store: JobStore,
        workers: Workers,
        settlements: SettlementBuilder,
        lease_seconds: float,
    ) -> None:
        self._store, self._workers = store, workers
        self._settlements, self._lease_seconds = settlements, lease_seconds
        self._next_look_at_own = 0.0  # monotonic
        self._detector = FailureDetector(workers.name, lease_seconds)

    def reap(self, known: Collection[Lease]) -> None:
        """Return the jobs of workers that have died, and jobs claimed by this worker that are not
        `known` to it: the reply to that claim was lost. Also maintain the queues."""
        if (now := time.monotonic()) >= self._next_look_at_own:
            self._next_look_at_own = now + self._lease_seconds
            if self._workers.elect_maintainer(self._store.queues, self._lease_seconds):
                self._store.maintenance.step()
            own = [job.lease for job in self._store.leases.started()]
            if unknown := [lease for lease in own if lease not in known]:
                self._store.leases.give_back(unknown)
        dead = self._look()
        if dead and self._workers.elect_reaper(self._lease_seconds):
            failed: Damaged | None = None
            for worker in dead:
                try:
                    self._return_jobs_of(worker)
                except Damaged as error:  # of one worker's keys: the others are next
                    failed = error
            if failed is not None:
                raise failed

    def reclaim_own(self, leases: Collection[Lease]) -> None:
        """Return the jobs of this worker, whose engine died while it ran them."""
        started = [job for job in self._store.leases.started() if job.lease in leases]
        self._count_death(started, self._store.leases, self._workers.name, None)

    def _look(self) -> list[DeadWorker]:
        now = time.monotonic()
        try:
            leases = self._workers.leases()
        except redis.RedisError:
            self._detector.forget()
            raise
        return self._detector.look(leases, self._workers.connections, now)

    def _return_jobs_of(self, dead: DeadWorker) -> None:
        leases = self._store.leases_of(dead)
        started = leases.started()
        announced = self._workers.announced(dead.name)
        if started:
            logger.warning(
                "worker %s %s; jobs that return to their queues: %d",
                dead.name,
                "has ended as announced" if announced else "does not renew its lease",
                len(started),
            )
        if announced:
            leases.give_back([job.lease for job in started])
        else:
            self._count_death(started, leases, dead.name, dead)
        self._workers.remove(dead)

    def _count_death(
        self,
        started: Sequence[StartedJob],
        leases: Leases,
        worker: str,
        dead: DeadWorker | None,
    ) -> None:
        """Count one more death for each job. One of them may be the cause: those that have seen
        several deaths are run again in two groups, each apart from all other jobs, and the group
        with which a worker dies is halved again, until the job runs alone."""
        counted = [
            replace(job, lost=job.lost + 1, failures=_with_death(job, worker)) for job in started
        ]
        if len(counted) == 1 and counted[0].lost >= MAX_LOST:
            lease = counted[0].lease
            error = self._settlements.for_error(
                self._store.read(lease), worker_lost(lease), counted[0].failures
            )
            self._store.settle([error], dead=dead)
            return
        suspects = [job for job in counted if job.lost >= SUSPECT_LOST]
        event = uuid.uuid4().hex
        half = (len(suspects) + 1) // 2
        first, second = suspects[:half], suspects[half:]
        groups = {job.lease: f"{event}-1" for job in first}
        groups |= {job.lease: f"{event}-2" for job in second}
        grouped = [replace(job, group=groups.get(job.lease, "")) for job in counted]
        leases.reclaim(grouped)


def _with_death(job: StartedJob, worker: str) -> tuple[Failure, ...]:
    """The failures of a job with the death of its worker."""
    error = JobError("worker_lost", "the worker died, or lost its connection for too long")
    return tuple(add_failure(job.failures, failure(job.lease.attempt, time.time(), worker, error)))
