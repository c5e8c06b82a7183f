"""The recorder as a process of its own: no model, no device, no torch. Owns its start and its end.

It shares the parts with the recorders of workers and with others like it, since each part has a
plan in Redis.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import redis

from jobs.errors import JobError
from jobs.record.folder import claim_folder
from jobs.record.last_rows import FINISH_SECONDS, ROWS_SECONDS, log_left
from jobs.record.recorder import PART_SECONDS, PLAN_SECONDS, Recorder
from jobs.signals import StopSignals
from jobs.store.connection.connect import check_server, connect, redis_failure
from jobs.store.damage import Damaged
from jobs.store.eviction import check_eviction
from jobs.store.recorders import STATUS_SECONDS, RecorderPresence
from jobs.store.rights import check_recorder_rights
from jobs.store.worker_status import read_workers
from jobs.tracing import open_tracing

logger = logging.getLogger(__name__)

STOP_SECONDS = 25.0  # from the first signal; Kubernetes kills after 30
REPORT_SECONDS = STATUS_SECONDS / 5


def record(
    *,
    redis_url: str | None = None,
    results: Path,
    once: bool = False,
    part_seconds: float = PART_SECONDS,
    plan_seconds: float = PLAN_SECONDS,
) -> None:
    """Write rows until SIGTERM or SIGINT; with `once`, until those that are in Redis are written.

    part_seconds: age of rows at which a small part is written while jobs run. plan_seconds: others
    take over the part of a recorder that has died, or is suspended, after this time. Runs on the
    main thread. Raises JobError if it can't start, or if rows of `once` can't be written.
    """
    client = connect(redis_url)
    try:
        check_server(client)
        check_eviction(client)
        check_recorder_rights(client)
        folder = claim_folder(client, results)
        name = f"{socket.gethostname().split('.')[0]}-{os.getpid()}-{secrets.token_hex(3)}"
        idle = partial(_runs_no_job, client)
        recorder = Recorder(
            connect(redis_url),
            folder,
            name=name,
            idle=idle,
            part_seconds=part_seconds,
            plan_seconds=plan_seconds,
            tracing=open_tracing(),
        )
        stop = _Stop()
        with StopSignals(stop, "rows are left in Redis, for other recorders or the next one"):
            recorder.start()
            with _Reports(RecorderPresence(client, name), recorder):
                logger.info("recorder %s writes to %s", name, folder.root)
                if not once:
                    stop.asked.wait()
                written = _finish(recorder, stop, once=once)
            written = log_left(recorder, redis_url, written=written) or written
        if once and not written and not stop.asked.is_set():
            fault = recorder.state["error"] or "other recorders hold them"
            raise JobError("unavailable", f"rows are left in Redis: {fault}")
    except redis.RedisError as error:
        raise redis_failure(client, error) from None
    finally:
        client.close()


class _Stop:
    """What the signals have asked for."""

    def __init__(self) -> None:
        self.aborted = False
        self.asked = threading.Event()
        self.stop_at: float | None = None  # monotonic

    def request_stop(self) -> None:
        if self.asked.is_set():
            logger.info("stopping now: rows are left in Redis")
            self.aborted = True
            return
        logger.info("stopping: writing the rows that are in Redis, for at most %g s", STOP_SECONDS)
        self.stop_at = time.monotonic() + STOP_SECONDS
        self.asked.set()


def _finish(recorder: Recorder, stop: _Stop, *, once: bool) -> bool:
    """Write the rows that are in Redis now. False if rows may be left."""
    failing_since: float | None = None

    def over(fault: str) -> bool:
        nonlocal failing_since
        now = time.monotonic()
        failing_since = (failing_since or now) if fault else None
        failed = now - failing_since if failing_since else 0.0
        if stop.stop_at is not None:
            return stop.aborted or now >= stop.stop_at or failed >= ROWS_SECONDS
        return failed >= FINISH_SECONDS

    return recorder.finish(over, with_others=once)


class _Reports:
    """A context in which a thread publishes the status of a recorder. While Redis can't be
    reached, there is none."""

    def __init__(self, presence: RecorderPresence, recorder: Recorder) -> None:
        self._presence, self._recorder = presence, recorder
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="status", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(1.0)  # longer only if Redis does not answer: the status expires then
        if not self._thread.is_alive():
            with suppress(redis.RedisError):
                self._presence.leave()

    def _loop(self) -> None:
        while True:
            with suppress(redis.RedisError):
                self._presence.report(self._recorder.state)
            if self._ended.wait(REPORT_SECONDS):
                return


def _runs_no_job(client: redis.Redis) -> bool:
    """True if no worker runs a job, so that waiting hardly makes a part larger. Raises
    redis.RedisError."""
    try:
        return not any(worker["running"] for worker in read_workers(client))
    except Damaged:  # workers and `chatjobs status` name the key
        return True
