"""One worker process: loads models, wires intake, publisher and recorder, owns start and end."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from jobs.client.connection import connect, redis_failure
from jobs.errors import JobError
from worker.backend import Backend
from worker.queue.loop import LEASE_SECONDS, WorkerLoop
from worker.queue.residency import load_all
from worker.record.recorder import PART_SECONDS, Recorder, check_folder

logger = logging.getLogger(__name__)

FINISH_SECONDS = 30.0  # how long the last rows may take to reach the disk
HANG_SECONDS = 120.0  # an engine that is busy and makes no step for this long counts as dead
SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT)
PLAN_LEASES = 2.5  # a part in the making belongs to its recorder for so many leases


def serve(
    backend: Backend,
    references: Sequence[str],
    *,
    redis_url: str | None = None,
    results: Path,
    grace: float = 30.0,
    burst: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    hang_seconds: float = HANG_SECONDS,
    part_seconds: float = PART_SECONDS,
) -> None:
    """Serve the models' queues until SIGTERM or SIGINT, or with `burst` until no job is left
    in them or with any worker.

    grace: seconds that running jobs get after the first signal. A worker that is silent for
    lease_seconds loses its jobs to others. Runs on the main thread. Raises JobError.
    """
    client = connect(redis_url)
    try:
        check_folder(results)
        _check_redis(client)
        models = load_all(backend, references)
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"
        recorder = Recorder(
            connect(redis_url),
            results,
            name=name,
            idle=lambda: not (backend.health().running or backend.health().waiting),
            part_seconds=part_seconds,
            plan_seconds=PLAN_LEASES * lease_seconds,
        )
        intake = WorkerLoop(
            backend,
            client,
            models,
            name=name,
            grace=grace,
            burst=burst,
            lease_seconds=lease_seconds,
            hang_seconds=hang_seconds,
            on_idle=recorder.look,
        )
        with _signals_stop(intake):
            recorder.start()
            logger.info("worker %s serves %s", name, ", ".join(model.name for model in models))
            try:
                intake.run()
            finally:
                done = recorder.finish(
                    FINISH_SECONDS, hurried=lambda: intake.hurried, with_others=burst
                )
                if not done:
                    logger.warning("rows are left in Redis: the next worker writes them")
    except redis.RedisError as error:
        raise redis_failure(client, error) from None
    finally:
        backend.close()
        client.close()


@contextmanager
def _signals_stop(intake: WorkerLoop) -> Iterator[None]:
    """SIGTERM and SIGINT ask the intake to stop: once gently, then at once, then without it."""
    before: dict[int, Any] = {}

    def stop(signum: int, frame: Any) -> None:
        if intake.hurried:
            signal.signal(signum, signal.SIG_DFL)
        intake.request_stop()

    for number in SIGNALS:
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_redis(client: redis.Redis) -> None:
    """Redis answers, and doesn't throw away what it was given."""
    memory = client.info("memory")
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        raise JobError(
            "internal",
            f"Redis may evict keys (maxmemory-policy {policy}), so jobs could be lost: set "
            "maxmemory-policy to noeviction",
        )
