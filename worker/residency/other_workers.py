"""The models that other workers have or can load, and the lease of a model that comes in."""

from __future__ import annotations

import redis

from jobs.store.worker_status import read_statuses
from jobs.store.workers import Workers


class OtherWorkers:
    """Implements `Elsewhere` in the name of the worker `workers.name`."""

    def __init__(self, client: redis.Redis, workers: Workers, lease_seconds: float) -> None:
        self._redis, self._workers, self._lease_seconds = client, workers, lease_seconds

    def ready(self) -> set[str]:
        return read_statuses(self._redis).ready(self._workers.name)

    def able(self) -> set[str] | None:
        return read_statuses(self._redis).able(self._workers.name)

    def lease(self, model: str) -> bool:
        return self._workers.elect_loader(model, self._lease_seconds)

    def release(self, model: str) -> None:
        self._workers.release_loader(model)
