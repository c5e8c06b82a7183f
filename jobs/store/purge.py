"""Deletes a job that has ended, and names what it has left in Redis."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs import keys, lua
from jobs.results.outbox import repeat_of, run_of
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.job_state import read_existing
from jobs.store.preludes import DELETE_JOB_LUA, QUEUE_LUA, RESERVATIONS_LUA
from jobs.store.rq_layout import (
    executions_key,
    job_key,
    queue_key,
    registry_key,
    results_key,
)

PURGE = lua.load("jobs.store", "purge", QUEUE_LUA, RESERVATIONS_LUA, DELETE_JOB_LUA)


# The tables of delete_job.lua, KEYS and ARGV of purge.lua, by name and in order.


class DeleteJobKeys(NamedTuple):
    job: str
    results: str
    log: str
    executions: str
    finished: str
    failed: str
    canceled: str
    queue: str
    open_bytes: str
    deadlines: str


class DeleteJobArgs(NamedTuple):
    job_id: str


class PurgeKeys(NamedTuple):
    rows: str


class PurgeArgs(NamedTuple):
    job_id: str
    row: str


def keys_of_job(job_id: str, queue: str) -> DeleteJobKeys:
    """The keys of a job in an RQ queue, for a script that deletes it."""
    return DeleteJobKeys(
        job=job_key(job_id),
        results=results_key(job_id),
        log=keys.log(job_id),
        executions=executions_key(job_id),
        finished=registry_key(queue, "finished"),
        failed=registry_key(queue, "failed"),
        canceled=registry_key(queue, "canceled"),
        queue=queue_key(queue),
        open_bytes=keys.OPEN_BYTES,
        deadlines=keys.DEADLINES,
    )


def purge(job_id: str) -> Steps[bool]:
    """Delete a job that has ended. False for one that has not."""
    state = yield from read_existing(job_id)
    row = _row_of(state.request)
    rows = PurgeKeys(keys.rows(run_of(state.request), row or 0))
    names = (*rows, *keys_of_job(job_id, state.queue))
    field = "" if row is None else keys.row_field(row, repeat_of(state.request))
    args = PurgeArgs(job_id, field)
    reply = yield from retry(command("eval", PURGE, len(names), *names, *args))
    return bool(reply)


def _row_of(request: dict[str, Any]) -> int | None:
    """The row of a request that any program may have written."""
    options = request.get("job")
    row = options.get("row") if isinstance(options, dict) else None
    return row if isinstance(row, int) and row >= 0 else None
