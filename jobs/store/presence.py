"""The worker as RQ's tools and `chatjobs status` see it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import redis
from redis.exceptions import OutOfMemoryError
from rq.suspension import WORKERS_SUSPENDED
from rq.utils import now
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus as RQState
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from jobs import keys, lua
from jobs.store import rq_layout
from jobs.store.redis_clock import RedisClock
from jobs.store.worker_status import WORKER, ProcessStatus, ServingStatus, WorkerStatus
from jobs.store.workers import worker_key

BIRTH = lua.load("jobs.store", "register")
REPORT = lua.load("jobs.store", "report")

STATUS_LEASES = 0.5  # that a status holds, unless the lease is renewed: it ends before the lease


class BirthKeys(NamedTuple):
    rq_worker: str
    rq_workers: str


class BirthArgs(NamedTuple):
    seconds: int


class ReportKeys(NamedTuple):
    status: str
    rq_worker: str


class ReportArgs(NamedTuple):
    about: bytes
    milliseconds: int
    state: str
    current: str
    now_text: str
    seconds: int


class LoadingPresence:
    """A worker that loads its models, as others see it: RQ does not know it yet."""

    def __init__(
        self, client: redis.Redis, name: str, status: ServingStatus, lease_seconds: float
    ) -> None:
        self._report = client.register_script(REPORT)
        self._names = ReportKeys(keys.worker(name), worker_key(name))
        self._args = ReportArgs(
            about=WORKER.encode(
                {**_process(name), **status, "lease_s": lease_seconds, "jobs": 0, "clock_behind": 0}
            ),
            milliseconds=int(STATUS_LEASES * lease_seconds * 1000),
            state="",
            current="",
            now_text="",
            seconds=0,
        )

    def report(self) -> None:
        """Publish it. Raises redis.RedisError."""
        self._report(keys=self._names, args=self._args)


class Presence:
    """One worker, listed from `birth` to `death`."""

    def __init__(
        self, client: redis.Redis, queues: Collection[str], name: str, lease_seconds: float
    ) -> None:
        self.name, self._lease_seconds = name, lease_seconds
        self._redis = client
        self._worker = BaseWorker(list(queues), name=name, connection=client, serializer="json")
        self.control_channel: str = self._worker.pubsub_channel_name  # of RQ's stop-job, shutdown
        self._clock = RedisClock()
        self._birth = client.register_script(BIRTH)
        self._report = client.register_script(REPORT)
        self._rq_seconds = int(5 * lease_seconds) + 1  # how long RQ's hash holds without a report
        self._told_rq: str | int | None = 0  # the current job that RQ knows; 0 before the first
        self._tell_rq_at = 0.0  # monotonic

    def birth(self) -> None:
        """Register with RQ, as a worker of the queues that it serves for its whole life."""
        rq = self._worker
        rq.birth_date = rq.last_heartbeat = now()
        fields = [part for field in rq.serialize().items() for part in field]
        self._birth(
            keys=[
                *BirthKeys(rq.key, rq.redis_workers_keys),
                *(WORKERS_BY_QUEUE_KEY % queue for queue in rq.queue_names()),
            ],
            args=[*BirthArgs(self._rq_seconds), *fields],
        )

    def report(self, status: ServingStatus, jobs: Sequence[str]) -> None:
        """Publish what the worker says about itself, beside its name and process. `jobs`: ids of
        the jobs that it runs."""
        about: WorkerStatus = {
            **_process(self.name),
            **status,
            "lease_s": self._lease_seconds,
            "jobs": len(jobs),
            "clock_behind": round(self._clock.behind),
        }
        current, now = jobs[0] if jobs else None, time.monotonic()
        tell_rq = current != self._told_rq or now >= self._tell_rq_at
        state = RQState.BUSY if jobs else RQState.IDLE
        args = ReportArgs(
            about=WORKER.encode(about),
            milliseconds=int(STATUS_LEASES * self._lease_seconds * 1000),
            state=state.value if tell_rq else "",
            current=current or "",
            now_text=rq_layout.format_time(),
            seconds=self._rq_seconds,
        )
        names = ReportKeys(keys.worker(self.name), self._worker.key)
        time_of_redis = self._report(keys=names, args=args)
        if time_of_redis is not None:
            self._clock.seen(float(time_of_redis))
        if tell_rq:
            self._told_rq, self._tell_rq_at = current, now + self._lease_seconds

    def may_pause(self) -> bool:
        """True if `rq suspend` has suspended all workers, or rows wait for Parquet."""
        return bool(self._redis.exists(WORKERS_SUSPENDED, keys.OUTBOXES))

    def suspended(self) -> bool:
        """True if `rq suspend` has suspended all workers."""
        return bool(self._redis.exists(WORKERS_SUSPENDED))  # RQ's is_suspended sends more

    def death(self) -> None:
        """Tell RQ that the worker has ended."""
        with suppress(OutOfMemoryError):  # RQ's hash of the worker expires soon
            self._worker.register_death()  # type: ignore[no-untyped-call]


def _process(name: str) -> ProcessStatus:
    return {"name": name, "host": socket.gethostname(), "pid": os.getpid()}
