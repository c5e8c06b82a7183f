"""Deletes a job that has ended, and names what it has left in Redis."""

from __future__ import annotations

from typing import NamedTuple

from jobs import keys, lua
from jobs.api.row_keys import named_rows
from jobs.results.outbox import run_of
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.job_state import read_existing
from jobs.store.preludes import DELETE_JOB_LUA, QUEUE_LUA, RESERVATIONS_LUA
from jobs.store.reservations import reserved_rows
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
    job: str


class PurgeArgs(NamedTuple):
    job_id: str
    fields: str


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
    rows = reserved_rows(run_of(state.request), named_rows(state.request).values())
    job_keys = keys_of_job(job_id, state.queue)
    names = (*PurgeKeys(job_keys.job), *job_keys, *rows.hashes)
    args = PurgeArgs(job_id, rows.fields)
    reply = yield from retry(command("eval", PURGE, len(names), *names, *args))
    return bool(reply)
