"""A reply that is due waits for Redis for a short time, and is an error if Redis is away or hangs.

This module owns these times. What a client waits for, its answer or the next part of a stream, has
the longer ones of `jobs.store.connection`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from jobs.errors import JobError
from jobs.store.connection.protocol import Connection, Steps, run_async

T = TypeVar("T")

AWAY_SECONDS = 2.0  # of reads, for a Redis that can't be reached, as during a fail-over
HANG_SECONDS = 10.0  # of all, for one that takes the command and does not reply


async def in_time(work: Awaitable[T]) -> T:
    """The result of work that Redis is needed for. Raises JobError."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            return await work
    except JobError:
        raise  # one of them is a TimeoutError
    except TimeoutError:
        raise JobError("unavailable", f"Redis has not replied within {HANG_SECONDS:g} s") from None


async def read_soon(steps_of: Callable[[float], Steps[T]], connection: Connection) -> T:
    """What steps read. `steps_of`: makes them, with the deadline (of time.monotonic) until which
    they wait for an outage to end. Raises JobError."""
    return await in_time(run_async(steps_of(time.monotonic() + AWAY_SECONDS), connection))
