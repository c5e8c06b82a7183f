"""A worker that still loads its models, as `chatjobs status` and waiting clients see it.

It has a lease and publishes its models under `loading`. Once its loop runs, lease keeper and
presence go on under the same name.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from jobs.store.presence import LoadingPresence
from jobs.store.worker_status import ServingStatus
from jobs.store.workers import Workers
from worker.backend import MemoryUse
from worker.queue.lease_keeper import RENEWALS_PER_LEASE
from worker.queue.status_collector import memory_status

PART = re.compile(r"-\d{5}-of-\d{5}$")  # of the name of a split GGUF file
SUFFIXES = (".gguf", ".safetensors", ".bin")


def loading_names(reference: str) -> list[str]:
    """The names that jobs may use for the model of a reference: which of them it has is known when
    it is loaded."""
    path = Path(reference)
    with suppress(OSError, RuntimeError):
        path = path.expanduser().resolve()
    name = path.stem if path.suffix.lower() in SUFFIXES else path.name
    repo = re.split("[:@]", reference, maxsplit=1)[0]
    return sorted({reference, repo, PART.sub("", name)} - {""})


class Loading:
    """A context in which the worker `workers.name` is listed as one that loads `references`. It
    ends with the worker's removal, unless all is loaded."""

    def __init__(
        self,
        client: redis.Redis,
        workers: Workers,
        references: Sequence[str],
        memory: MemoryUse,
        lease_seconds: float,
    ) -> None:
        self._workers, self._lease_seconds = workers, lease_seconds
        status: ServingStatus = {
            "models": [],  # none is served yet
            "names": [],
            "loading": {one: loading_names(one) for one in references},
            "started_at": time.time(),
            "device": memory.device,
            "memory": memory_status(memory),
            "paused": "",
            "results": None,
            "running": 0,
            "tokens_per_second": 0.0,
        }
        self._presence = LoadingPresence(client, workers.name, status, lease_seconds)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="loading", daemon=True)

    def __enter__(self) -> Self:
        """Raises redis.RedisError."""
        self._publish()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is not None:
            with suppress(redis.RedisError):  # the lease expires
                self._workers.leave()
        self._workers.close()

    def _loop(self) -> None:
        while not self._ended.wait(self._lease_seconds / RENEWALS_PER_LEASE):
            with suppress(redis.RedisError):  # the next time may work; the loop reports an outage
                self._publish()

    def _publish(self) -> None:
        self._workers.renew(self._lease_seconds, stopping=False)
        self._presence.report()
