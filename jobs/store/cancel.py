"""Ending jobs that wait: a client cancels them, a worker ends those whose time to live has passed.

A running job is cancelled by a message to its worker.
"""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from jobs import keys, lua
from jobs.errors import JobError
from jobs.results import outbox
from jobs.store.new_job import ROW_SECONDS
from jobs.store.rq_format import (
    DEPENDENTS_LUA,
    FAILURE_SECONDS,
    ROWS_LUA,
    End,
    deferred_key,
    format_time,
    job_key,
    queue_key,
    registry_key,
    result_fields,
    results_key,
    scheduled_key,
)
from jobs.store.state import JobState, Status, read_state, unknown
from jobs.store.steps import Steps, command, retry
from jobs.store.turns import TURNS_LUA
from jobs.stream.entries import END_LUA, end_id, end_payload

CANCEL = lua.load("jobs.store", "rq_cancel", END_LUA, DEPENDENTS_LUA, TURNS_LUA, ROWS_LUA)


# KEYS and ARGV of rq_cancel.lua, by name and in order.


class CancelKeys(NamedTuple):
    job: str
    queue: str
    quarantine: str
    scheduled: str
    deferred: str
    registry: str
    results: str
    outbox: str
    outboxes: str
    log: str
    live: str
    open_bytes: str
    deadlines: str
    rows: str


class CancelArgs(NamedTuple):
    job_id: str
    status: str
    expected_attempt: bytes
    attempt: int
    error: str
    row: str
    run: str
    end_id: str
    end_payload: str
    ended_at: str
    now: int
    keep: int
    row_field: int
    row_seconds: int
    control_channel: str
    control_message: str


def cancel(job_id: str) -> Steps[bool]:
    """Cancel the job. False if it had ended already."""
    while True:
        state = yield from read_state(job_id, full=True)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        if state.status.over:
            return False
        error = JobError("cancelled", f"job {job_id} was cancelled before it was run")
        message = json.dumps({"op": "cancel", "job": job_id})
        reply = yield from end_waiting(state, error, "canceled", message)
        if reply != b"again":
            return reply != b"over"


def end_waiting(state: JobState, error: JobError, end: End, message: str = "") -> Steps[bytes]:
    """The reply of rq_cancel.lua; `again` if the job has changed since `state` was read. `message`:
    for the worker of a job that does not wait but runs."""
    now = time.time()
    # A job that was requeued has a row of its last attempt: this end is the next one.
    attempt = state.attempt + (state.row_attempt == state.attempt)
    status: outbox.Status = "cancelled" if end == "canceled" else "error"
    row = outbox.outbox_entry(
        state.id,
        state.request,
        status,
        attempt=attempt,
        error=error.to_dict(),
        enqueued_at=state.enqueued_at,
        finished_at=now,
    )
    script_keys = CancelKeys(
        job=job_key(state.id),
        queue=queue_key(state.queue),
        quarantine=keys.quarantine(state.queue),
        scheduled=scheduled_key(state.queue),
        deferred=deferred_key(state.queue),
        registry=registry_key(state.queue, end),
        results=results_key(state.id),
        outbox=keys.outbox(row["run"]),
        outboxes=keys.OUTBOXES,
        log=keys.log(state.id),
        live=keys.live(state.id),
        open_bytes=keys.OPEN_BYTES,
        deadlines=keys.DEADLINES,
        rows=keys.rows(row["run"], row["row_index"]),
    )
    script_args = CancelArgs(
        job_id=state.id,
        status=end,
        expected_attempt=state.attempt_text,
        attempt=attempt,
        error=json.dumps(error.to_dict()),
        row=outbox.encode(row),
        run=row["run"],
        end_id=end_id(attempt),
        end_payload=end_payload("cancelled" if end == "canceled" else "error", error=error),
        ended_at=format_time(),
        now=int(now),
        keep=max(0, state.failure_ttl or 0) or FAILURE_SECONDS,
        row_field=row["row_index"] % keys.ROWS_PER_KEY,
        row_seconds=ROW_SECONDS,
        control_channel=keys.CONTROL,
        control_message=message,
    )
    result = result_fields(state.id, end, error=str(error))
    call = command("eval", CANCEL, len(script_keys), *script_keys, *script_args, *result)
    reply: bytes = yield from retry(call)
    return reply
