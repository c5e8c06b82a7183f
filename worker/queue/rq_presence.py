"""The worker as RQ's tools and `chatjobs status` see it."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from redis.exceptions import OutOfMemoryError
from rq.suspension import WORKERS_SUSPENDED
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from jobs import keys, lua
from jobs.client import rq_format

logger = logging.getLogger(__name__)

REPORT = lua.load("worker.queue", "rq_report")

FIGURES_SECONDS = 0.5  # of a lease: figures that are older are those of a worker that is gone


class ReportKeys(NamedTuple):
    figures: str
    rq_worker: str


class ReportArgs(NamedTuple):
    about: str
    milliseconds: int
    state: str
    current: str
    now_text: str
    seconds: int


class RQPresence:
    """One worker, listed from `birth` to `death`."""

    def __init__(
        self, client: redis.Redis, queues: Sequence[str], name: str, lease_seconds: float
    ) -> None:
        self.name, self._lease_seconds = name, lease_seconds
        self._redis = client
        self._worker = BaseWorker(queues, name=name, connection=client, serializer="json")
        self.control_channel: str = self._worker.pubsub_channel_name  # of RQ's stop-job, shutdown
        self._report = client.register_script(REPORT)
        self._told_rq: str | int | None = 0  # the current job that RQ knows; 0 before the first
        self._tell_rq_at = 0.0  # monotonic

    def birth(self) -> None:
        """Register with RQ, unless Redis is full: RQ's tools then do not list the worker."""
        try:
            self._worker.register_birth()  # type: ignore[no-untyped-call]
        except OutOfMemoryError as error:
            logger.warning("Redis is full: RQ's tools will not list this worker (%s)", error)

    def report(self, figures: Mapping[str, Any], jobs: Sequence[str]) -> None:
        """Publish what the worker says about itself, beside its name and process. `jobs`: ids of
        the jobs that it runs."""
        about = {"name": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        about |= {"jobs": len(jobs), **figures}
        current, now = jobs[0] if jobs else None, time.monotonic()
        tell_rq = current != self._told_rq or now >= self._tell_rq_at
        state = WorkerStatus.BUSY if jobs else WorkerStatus.IDLE
        args = ReportArgs(
            about=json.dumps(about),
            milliseconds=int(FIGURES_SECONDS * self._lease_seconds * 1000),
            state=state.value if tell_rq else "",
            current=current or "",
            now_text=rq_format.format_time(),
            seconds=int(5 * self._lease_seconds) + 1,
        )
        self._report(keys=ReportKeys(keys.worker(self.name), self._worker.key), args=args)
        if tell_rq:
            self._told_rq, self._tell_rq_at = current, now + self._lease_seconds

    def may_pause(self) -> bool:
        """Whether `rq suspend` has suspended all workers, or rows wait for Parquet."""
        return bool(self._redis.exists(WORKERS_SUSPENDED, keys.OUTBOXES))

    def suspended(self) -> bool:
        """Whether `rq suspend` has suspended all workers."""
        return bool(self._redis.exists(WORKERS_SUSPENDED))  # RQ's is_suspended sends more

    def death(self) -> None:
        """Tell RQ that the worker has ended."""
        with suppress(OutOfMemoryError):  # RQ's hash of the worker expires soon
            self._worker.register_death()  # type: ignore[no-untyped-call]
