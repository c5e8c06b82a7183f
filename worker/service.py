"""One worker process: loads models, wires intake, publisher and recorder, owns start and end."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import redis

from jobs.connection import connect, redis_failure
from jobs.types import JobError
from worker.backend import Backend
from worker.intake import LEASE_SECONDS, Intake
from worker.recorder import PART_SECONDS, Recorder, check_folder
from worker.residency import load_all

logger = logging.getLogger(__name__)

FINISH_SECONDS = 30.0  # how long the last rows may take to reach the disk


def serve(
    backend: Backend,
    references: Sequence[str],
    *,
    redis_url: str | None = None,
    results: Path,
    grace: float = 30.0,
    burst: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    part_seconds: float = PART_SECONDS,
) -> None:
    """Serve the models' queues until SIGTERM or SIGINT, or with `burst` until they are empty.

    grace: seconds that running jobs get after the first signal. A worker that is silent for
    lease_seconds loses its jobs to others. Runs on the main thread. Raises JobError.
    """
    client = connect(redis_url)
    check_folder(results)
    try:
        _check_redis(client)
        models = load_all(backend, references)
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"
        recorder = Recorder(
            client,
            results,
            name=name,
            idle=lambda: not (backend.health().running or backend.health().waiting),
            part_seconds=part_seconds,
            plan_seconds=2.5 * lease_seconds,
        )
        intake = Intake(
            backend,
            client,
            models,
            name=name,
            backlog=recorder.backlog,
            grace=grace,
            burst=burst,
            lease_seconds=lease_seconds,
        )
        before = {
            number: signal.signal(number, intake.request_stop)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        recorder.start()
        logger.info("worker %s serves %s", name, ", ".join(model.name for model in models))
        try:
            intake.run()
        finally:
            recorder.finish(FINISH_SECONDS)
            for number, handler in before.items():
                signal.signal(number, handler)
    except redis.RedisError as error:
        raise redis_failure(client, error) from None
    finally:
        backend.close()
        client.close()


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
