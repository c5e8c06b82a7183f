"""The workers as they see each other: leases, the jobs that each has started, and who is gone.

The lease of a worker is its score in one sorted set. lease_keeper.py renews it, failure_detector.py
decides who has died, reaper.py returns the jobs.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from rq.worker import BaseWorker

from jobs import keys, lua
from jobs.store.connection.connect import connect
from jobs.store.damage import Damage, Reports, wrong_types
from jobs.store.worker_status import MAX_LEASE

RENEW = lua.load("jobs.store", "renew")
LEAVE = lua.load("jobs.store", "leave")
ELECT = lua.load("jobs.store", "elect")


class RenewKeys(NamedTuple):
    workers: str
    stopping: str
    status: str


class RenewArgs(NamedTuple):
    name: str
    milliseconds: int
    is_stopping: int


class LeaveKeys(NamedTuple):
    workers: str
    stopping: str
    started: str
    status: str
    rq_worker: str
    rq_workers: str


class LeaveArgs(NamedTuple):
    name: str
    seen_lease: int | str


class ElectKeys(NamedTuple):
    lock: str


class ElectArgs(NamedTuple):
    name: str
    milliseconds: int


@dataclass(frozen=True, slots=True)
class DeadWorker:
    """A worker that does not renew its lease. `lease`: the end of the lease that was seen; if it
    differs now, the worker is alive, and nothing that is done in its name has an effect."""

    name: str
    lease: int


def worker_key(name: str) -> str:
    """RQ's hash of a worker."""
    return f"{BaseWorker.redis_worker_namespace_prefix}{name}"


class Workers:
    """The set of workers, in the name of one of them. Its connections are its own.

    A command that gets no reply for `patience` seconds fails, and none is sent again: so whoever
    calls knows that two replies came over one connection if `connections` has not changed.
    """

    def __init__(
        self, url: str | None, name: str, queues: Collection[str], patience: float
    ) -> None:
        self.name = name
        self.connections = 0  # made so far
        self._queues = queues
        client = connect(url)
        client.set_retry(Retry(NoBackoff(), 0))
        client.connection_pool.connection_kwargs |= {
            "socket_timeout": patience,
            "socket_connect_timeout": patience,
            "redis_connect_func": self._connected,
        }
        self._redis: Any = client
        self._renew, self._leave = client.register_script(RENEW), client.register_script(LEAVE)
        self._elect = client.register_script(ELECT)
        self._locks: set[str] = set()  # leader locks that this worker has acquired
        self._reports = Reports()

    def renew(self, seconds: float, *, stopping: bool) -> None:
        """Extend the lease to `seconds` from now, and keep the status as long. `stopping`: announce
        the worker's end."""
        self._renew(
            keys=RenewKeys(keys.WORKERS, keys.STOPPING, keys.worker(self.name)),
            args=RenewArgs(self.name, int(seconds * 1000), int(stopping)),
        )

    def leases(self) -> dict[str, int]:
        """The end of the lease of each worker, in ms since the epoch by the clock of Redis. Members
        of the set that no worker has written are reported and left out."""
        found = self._redis.zrange(keys.WORKERS, 0, -1, withscores=True)
        read = [_read_lease(name, score) for name, score in found]
        self._reports.update(keys.WORKERS, [one for one in read if isinstance(one, Damage)])
        return dict(one for one in read if not isinstance(one, Damage))

    def elect_reaper(self, seconds: float) -> bool:
        """True if this worker returns the jobs of dead ones, for `seconds` from now."""
        return self._hold(keys.REAPER, seconds)

    def elect_maintainer(self, queues: Collection[str], seconds: float) -> bool:
        """True if this worker maintains the queues, for `seconds` from now."""
        return self._hold(keys.upkeep(queues), seconds)

    def elect_isolated(self, queue: str, seconds: float) -> bool:
        """True if this worker is the one that becomes idle to run the suspects of a queue, for
        `seconds` from now."""
        return self._hold(keys.quarantine_worker(queue), seconds)

    def elect_loader(self, model: str, seconds: float) -> bool:
        """True if this worker is the one that brings a model into its memory, for `seconds` from
        now."""
        return self._hold(keys.loading(model), seconds)

    def release_loader(self, model: str) -> None:
        """Let other workers bring a model in."""
        self._release(keys.loading(model))

    def _hold(self, key: str, seconds: float) -> bool:
        """True if this worker holds the leader lock `key`, for `seconds` from now."""
        args = ElectArgs(self.name, int(seconds * 1000))
        elected = bool(self._elect(keys=ElectKeys(key), args=args))
        if elected:
            self._locks.add(key)
        return elected

    def announced(self, name: str) -> bool:
        """True if a worker has announced its end; False if that can't be read."""
        wrong = wrong_types(self._redis, [keys.STOPPING])
        self._reports.update(keys.STOPPING, wrong)
        return not wrong and bool(self._redis.sismember(keys.STOPPING, name))

    def leave(self) -> None:
        """Remove this worker, unless it has started jobs left, and release its locks."""
        self._remove(self.name, "")
        for lock in list(self._locks):
            self._release(lock)

    def _release(self, lock: str) -> None:
        """Release a leader lock, if this worker holds it."""
        if self._redis.mget([lock]) == [self.name.encode()]:
            self._redis.delete(lock)
        self._locks.discard(lock)

    def remove(self, dead: DeadWorker) -> None:
        """Remove a dead worker, unless it has started jobs left."""
        self._remove(dead.name, dead.lease)

    def close(self) -> None:
        self._redis.close()

    def _remove(self, name: str, seen_lease: int | str) -> None:
        script_keys = LeaveKeys(
            workers=keys.WORKERS,
            stopping=keys.STOPPING,
            started=keys.started(name),
            status=keys.worker(name),
            rq_worker=worker_key(name),
            rq_workers=BaseWorker.redis_workers_keys,
        )
        self._leave(keys=script_keys, args=[*LeaveArgs(name, seen_lease), *self._queues])

    def _connected(self, connection: redis.Connection) -> None:
        self.connections += 1
        connection.on_connect()  # type: ignore[no-untyped-call]


def _read_lease(name: bytes, score: float) -> tuple[str, int] | Damage:
    """Name and lease of a member of the set of workers."""
    if abs(score) <= MAX_LEASE:
        with suppress(UnicodeDecodeError):
            return name.decode(), int(score)
    return Damage(
        keys.WORKERS,
        f"has the member {name!r} with the score {score:g}, which is no worker with its lease",
        "remove it (ZREM)",
    )
