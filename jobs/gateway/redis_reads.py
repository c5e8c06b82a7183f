"""Reads of Redis for a reply that is due: they fail soon if Redis is away or hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from jobs.errors import JobError
from jobs.store.connection.protocol import Connection, Steps, run_async

T = TypeVar("T")

AWAY_SECONDS = 2.0  # for a Redis that can't be reached, as during a fail-over
HANG_SECONDS = 10.0  # for one that takes the command and does not reply


async def read_soon(steps_of: Callable[[float], Steps[T]], connection: Connection) -> T:
    """What steps read. `steps_of`: makes them, with the deadline (of time.monotonic) until which
    they wait for an outage to end. Raises JobError."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            return await run_async(steps_of(time.monotonic() + AWAY_SECONDS), connection)
    except TimeoutError:
        raise JobError("unavailable", f"Redis has not replied within {HANG_SECONDS:g} s") from None
