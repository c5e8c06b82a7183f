"""Ends a worker's recorder: limits the time for the last rows, and logs how many are left."""

from __future__ import annotations

import logging
import time
from typing import Protocol

import redis

from jobs.record.recorder import Recorder
from jobs.store.backlog import any_records, read_unwritten
from jobs.store.connection.connect import connect, limit_waits
from jobs.store.worker_status import read_recorders, read_workers

logger = logging.getLogger(__name__)

ROWS_SECONDS = 3.0  # beyond the grace period; also the most if they can't be written
# The most at all. A worker that ends by itself also waits for the rows that others hold.
FINISH_SECONDS = 30.0
ASK_SECONDS = 1.0  # how long Redis may take to say what is left


class Stopping(Protocol):
    """The worker's loop, which has ended."""

    aborted: bool  # asked twice to stop
    stop_at: float | None  # monotonic: end of the grace period; None if it ended by itself


def write_last_rows(
    recorder: Recorder, loop: Stopping, redis_url: str | None, *, burst: bool
) -> bool:
    """Write the rows that wait, and log what is left. False if rows may be left."""
    ended = time.monotonic()

    def over(fault: str) -> bool:
        limit = ended + FINISH_SECONDS
        if loop.stop_at is not None:
            limit = min(limit, max(loop.stop_at, ended) + ROWS_SECONDS)
            limit = min(limit, ended + ROWS_SECONDS) if fault else limit
        return loop.aborted or time.monotonic() >= limit

    written = recorder.finish(over, with_others=burst)
    return log_left(recorder, redis_url, written=written) or written


def log_left(recorder: Recorder, redis_url: str | None, *, written: bool) -> bool:
    """Log how many rows are left in Redis by a recorder that has finished, and who writes them.
    True if none are. `written`: by `Recorder.finish`."""
    fault = recorder.state["error"]
    try:
        left, others = _left(redis_url)
    except redis.RedisError as error:
        if not written:
            logger.warning("Redis fails (%s): the rows that it holds are written later", error)
        return False
    if not left:
        return True
    if not written and fault:
        logger.error("rows left in Redis until they can be written: %d (%s)", left, fault)
    elif written or others:
        logger.info("rows left in Redis, which the other recorders write: %d", left)
    else:
        logger.warning("rows left in Redis, which the next recorder writes: %d", left)
    return False


def _left(redis_url: str | None) -> tuple[int, bool]:
    """The number of rows in Redis, and whether other recorders write rows."""
    with connect(redis_url) as client:
        limit_waits(client, ASK_SECONDS)
        processes = [*read_workers(client), *read_recorders(client)]
        return read_unwritten(client).count, any_records(processes)
