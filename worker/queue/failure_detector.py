"""Decides which workers have died, from leases that are not renewed. Uses no Redis.

While Redis is away nobody can renew a lease, and afterwards the first worker to come back sees the
leases of all others expired. So time counts only while this worker itself could have renewed:
between looks that follow each other closely and came over one connection, and while it does renew
its own lease, which Redis refuses while it takes no writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.store.workers import DeadWorker

CLOSE_LOOKS = 0.5  # of a lease: looks that are further apart prove nothing about the time between
OWN_AGE = 0.75  # of a lease: an own lease that was renewed longer ago proves that none could be


@dataclass(slots=True)
class _Seen:
    lease: int
    since: float  # monotonic


class FailureDetector:
    """The leases of the other workers, as one worker has seen them. A lease lasts
    `lease_seconds`."""

    def __init__(self, name: str, lease_seconds: float) -> None:
        self._name, self._lease_seconds = name, lease_seconds
        self._seen: dict[str, _Seen] = {}
        self._connection, self._looked_at = -1, 0.0
        self._own = _Seen(-1, 0.0)  # the own lease

    def look(self, leases: Mapping[str, int], connection: int, now: float) -> list[DeadWorker]:
        """The workers that have not renewed their lease for at least a lease, in which this one has
        looked at it several times without interruption. `connection`: number of the connection
        that the leases came over; `now`: monotonic time before they were asked for."""
        if (own := leases.get(self._name, -1)) != self._own.lease:
            self._own = _Seen(own, now)
        renews = now - self._own.since <= OWN_AGE * self._lease_seconds
        close = now - self._looked_at <= CLOSE_LOOKS * self._lease_seconds
        if connection != self._connection or not close or not renews:
            self._seen = {}
        self._connection, self._looked_at = connection, now
        if not renews:
            return []
        before, self._seen = self._seen, {}
        dead = []
        for name, lease in leases.items():
            seen = before.get(name)
            if name == self._name:
                continue
            if seen is None or seen.lease != lease:
                self._seen[name] = _Seen(lease, now)
                continue
            self._seen[name] = seen
            if now - seen.since >= self._lease_seconds:
                dead.append(DeadWorker(name, lease))
        return dead

    def forget(self) -> None:
        """A look has failed: what was seen before proves nothing any more."""
        self._seen = {}
