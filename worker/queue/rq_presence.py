"""The worker as Redis knows it: its registration with RQ, and the lease on its jobs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from rq.suspension import is_suspended
from rq.worker import BaseWorker
from rq.worker.base import WorkerStatus

from jobs import keys


def worker_key(name: str) -> str:
    """RQ's hash of a worker."""
    return f"{BaseWorker.redis_worker_namespace_prefix}{name}"


class RQPresence:
    """One worker. RQ's tools list it by `birth` and `renew`; other workers take its jobs when
    `lease_seconds` have passed without a `renew`."""

    def __init__(
        self, client: redis.Redis, queues: Sequence[str], name: str, lease_seconds: float
    ) -> None:
        self.name, self.lease_seconds = name, lease_seconds
        self._redis = client
        self._worker = BaseWorker(queues, name=name, connection=client, serializer="json")
        self.control_channel: str = self._worker.pubsub_channel_name  # of RQ's stop-job, shutdown

    def birth(self) -> None:
        """Register with RQ."""
        self._worker.register_birth()  # type: ignore[no-untyped-call]

    def renew(self, report: Mapping[str, Any], jobs: Sequence[str]) -> None:
        """Renew the lease for `lease_seconds`. `report`: what the worker says about itself, beside
        its name and process; `jobs`: ids of the jobs that it runs."""
        lease = {"name": self.name, "host": socket.gethostname(), "pid": os.getpid()}
        lease |= {"jobs": len(jobs), **report}
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.set(keys.worker(self.name), json.dumps(lease), px=int(self.lease_seconds * 1000))
        self._worker.heartbeat(int(5 * self.lease_seconds) + 1, pipeline=pipeline)
        self._worker.set_state(WorkerStatus.BUSY if jobs else WorkerStatus.IDLE, pipeline=pipeline)
        self._worker.set_current_job_id(jobs[0] if jobs else None, pipeline=pipeline)
        pipeline.execute()

    def suspended(self) -> bool:
        """Whether `rq suspend` has suspended all workers."""
        # Without its `worker` argument: with it, the call would also send a heartbeat.
        return bool(is_suspended(self._redis))

    def death(self) -> None:
        """End the lease and tell RQ that the worker has ended."""
        self._redis.delete(keys.worker(self.name))
        self._worker.register_death()  # type: ignore[no-untyped-call]
