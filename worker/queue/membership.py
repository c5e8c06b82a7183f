"""This worker among the others: its lease, and its entry in RQ's lists and in `chatjobs status`."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.store.presence import Presence
from jobs.store.worker_status import ServingStatus
from jobs.store.workers import Workers
from worker.queue.lease_keeper import LeaseKeeper


class Membership:
    """A worker is a member from `keep_lease` to `leave`. Used by the loop's thread.

    It has had its lease since it began to load. `keeper` renews it over a connection of its own.
    """

    def __init__(self, presence: Presence, workers: Workers, keeper: LeaseKeeper) -> None:
        self._presence, self._workers, self._keeper = presence, workers, keeper

    def keep_lease(self) -> None:
        """Renew the lease from now on, also while Redis is away."""
        self._keeper.start()

    def register(self) -> None:
        """Register with RQ. Raises redis.RedisError, and may be called again then."""
        self._presence.birth()

    def report(self, status: ServingStatus, jobs: Sequence[str]) -> None:
        """Publish the status and the ids of the jobs that run. Raises redis.RedisError."""
        self._presence.report(status, jobs)

    def announce_stop(self) -> None:
        """Tell the other workers that this one ends soon. May be called from any thread."""
        self._keeper.announce_stop()

    def leave(self) -> None:
        """Give up the lease and sign off. Raises redis.RedisError: the lease expires then."""
        self._keeper.stop()  # first: a renewal would bring the lease back
        self._workers.leave()
        self._presence.death()

    def close(self) -> None:
        """End the thread that renews the lease, and close the connections."""
        self._keeper.stop()
        self._workers.close()
