"""The worker as RQ's tools and `chatjobs status` see it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from rq.suspension import WORKERS_SUSPENDED
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from jobs import keys

FIGURES_SECONDS = 0.5  # of a lease: figures that are older are those of a worker that is gone


class RQPresence:
    """One worker, listed from `birth` to `death`."""

    def __init__(
        self, client: redis.Redis, queues: Sequence[str], name: str, lease_seconds: float
    ) -> None:
        self.name, self._lease_seconds = name, lease_seconds
        self._redis = client
        self._worker = BaseWorker(queues, name=name, connection=client, serializer="json")
        self.control_channel: str = self._worker.pubsub_channel_name  # of RQ's stop-job, shutdown
        self._told_rq: str | int | None = 0  # the current job that RQ knows; 0 before the first
        self._tell_rq_at = 0.0  # monotonic

    def birth(self) -> None:
        """Register with RQ."""
        self._worker.register_birth()  # type: ignore[no-untyped-call]

    def report(self, figures: Mapping[str, Any], jobs: Sequence[str]) -> None:
        """Publish what the worker says about itself, beside its name and process. `jobs`: ids of
        the jobs that it runs."""
        about = {"name": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        about |= {"jobs": len(jobs), **figures}
        pipeline = self._redis.pipeline(transaction=False)
        milliseconds = int(FIGURES_SECONDS * self._lease_seconds * 1000)
        pipeline.set(keys.worker(self.name), json.dumps(about), px=milliseconds)
        current, now = jobs[0] if jobs else None, time.monotonic()
        tell_rq = current != self._told_rq or now >= self._tell_rq_at
        if tell_rq:
            state = WorkerStatus.BUSY if jobs else WorkerStatus.IDLE
            self._worker.heartbeat(int(5 * self._lease_seconds) + 1, pipeline=pipeline)
            self._worker.set_state(state, pipeline=pipeline)
            self._worker.set_current_job_id(current, pipeline=pipeline)
        pipeline.execute()
        if tell_rq:
            self._told_rq, self._tell_rq_at = current, now + self._lease_seconds

    def suspended(self) -> bool:
        """Whether `rq suspend` has suspended all workers."""
        return bool(self._redis.exists(WORKERS_SUSPENDED))  # RQ's is_suspended sends more

    def death(self) -> None:
        """Tell RQ that the worker has ended."""
        self._worker.register_death()  # type: ignore[no-untyped-call]
