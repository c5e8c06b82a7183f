"""Returns the jobs of dead workers to their queues, and fails those that keep killing workers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from worker.queue.attempt import SettlementBuilder, worker_lost
from worker.queue.rq_job import Lease
from worker.queue.rq_store import RQStore

logger = logging.getLogger(__name__)


class Reaper:
    """Works in the name of `worker`, on the queues of `store`."""

    def __init__(self, store: RQStore, settlements: SettlementBuilder, worker: str) -> None:
        self._store, self._settlements, self._worker = store, settlements, worker

    def reap(self, known: Collection[Lease]) -> None:
        """Return the jobs of workers whose lease has expired, and jobs claimed by this worker that
        are not `known` to it: the reply to that claim was lost."""
        self._store.upkeep.step()
        for queue in self._store.queues:
            started = self._store.started(queue)
            own = [job.lease for job in started if job.worker == self._worker]
            if unknown := [lease for lease in own if lease not in known]:
                self._store.give_back(unknown)
            for job in reversed(started):  # each goes to the front: the first one last
                if job.worker != self._worker and not job.alive:
                    logger.warning(
                        "the lease of worker %s has expired: returning job %s",
                        job.worker,
                        job.lease.job,
                    )
                    self._reclaim(job.lease, job.worker)

    def reclaim_own(self, leases: Sequence[Lease]) -> None:
        """Return the jobs of this worker, whose engine died while it ran them."""
        for lease in reversed(leases):
            self._reclaim(lease, None)

    def _reclaim(self, lease: Lease, dead: str | None) -> None:
        if not self._store.reclaim(lease, dead):
            refused = self._settlements.for_error(self._store.read(lease), worker_lost(lease))
            self._store.settle([refused], dead=dead)
