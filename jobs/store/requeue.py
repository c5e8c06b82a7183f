"""Puts a failed or cancelled job back into its queue."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs import keys, lua
from jobs.api.job_options import MAX_SECONDS
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.job_state import read_existing
from jobs.store.preludes import QUEUE_LUA, RESERVATIONS_LUA
from jobs.store.rq_layout import (
    format_time,
    job_key,
    queue_key,
    registry_key,
)

REQUEUE = lua.load("jobs.store", "requeue", QUEUE_LUA, RESERVATIONS_LUA)


# KEYS and ARGV of the scripts, by name and in order.


class RequeueKeys(NamedTuple):
    job: str
    queue: str
    failed: str
    canceled: str
    open_bytes: str
    deadlines: str


class RequeueArgs(NamedTuple):
    job_id: str
    enqueued_at: str
    ttl: int | str


def requeue(job_id: str) -> Steps[bool]:
    """Put a failed or cancelled job back into its queue; its time to live starts again. False for a
    job in another state."""
    state = yield from read_existing(job_id)
    names = RequeueKeys(
        job=job_key(job_id),
        queue=queue_key(state.queue),
        failed=registry_key(state.queue, "failed"),
        canceled=registry_key(state.queue, "canceled"),
        open_bytes=keys.OPEN_BYTES,
        deadlines=keys.DEADLINES,
    )
    options = state.request.get("job")
    ttl = options.get("ttl") if isinstance(options, dict) else None
    args = RequeueArgs(
        job_id=job_id,
        enqueued_at=format_time(),
        ttl=_milliseconds(ttl),
    )
    reply = yield from retry(command("eval", REQUEUE, len(names), *names, *args))
    return bool(reply)


def _milliseconds(ttl: Any) -> int | str:
    """A time to live that any program may have written; '' for none."""
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_SECONDS:
        return ""
    return max(1, round(1000 * ttl))
