"""Cancelling a job: at once while it is queued, by a message to its worker while it runs."""

from __future__ import annotations

import json
import time
from typing import NamedTuple

from jobs import keys, lua
from jobs.client.rq_format import (
    FAILURE_SECONDS,
    format_time,
    job_key,
    queue_key,
    registry_key,
    result_fields,
    results_key,
)
from jobs.client.state import JobState, Status, read_state, unknown
from jobs.client.steps import Steps, command, retry
from jobs.errors import JobError
from jobs.results import outbox
from jobs.stream.entries import END_LUA, end_id, end_payload

CANCEL = lua.load("jobs.client", "rq_cancel", END_LUA)


# The names of the `unpack` lines of rq_cancel.lua, in the same order.


class CancelKeys(NamedTuple):
    job: str
    queue: str
    registry: str
    results: str
    outbox: str
    outboxes: str
    log: str
    live: str


class CancelArgs(NamedTuple):
    job_id: str
    expected_attempt: int
    error: str
    row: str
    run: str
    end_id: str
    end_payload: str
    ended_at: str
    now: int
    keep: int
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
        reply = yield from _run_script(state)
        if reply != b"again":
            return reply != b"over"


def _run_script(state: JobState) -> Steps[bytes]:
    """The reply of rq_cancel.lua; `again` if the job has changed since `state` was read."""
    error = JobError("cancelled", f"job {state.id} was cancelled before it was run")
    now = time.time()
    row = outbox.outbox_entry(
        state.id,
        state.request,
        "cancelled",
        attempt=state.attempt,
        error=error.to_dict(),
        enqueued_at=state.enqueued_at,
        finished_at=now,
    )
    script_keys = CancelKeys(
        job=job_key(state.id),
        queue=queue_key(state.queue),
        registry=registry_key(state.queue, "canceled"),
        results=results_key(state.id),
        outbox=keys.outbox(row["run"]),
        outboxes=keys.OUTBOXES,
        log=keys.log(state.id),
        live=keys.live(state.id),
    )
    script_args = CancelArgs(
        job_id=state.id,
        expected_attempt=state.attempt,
        error=json.dumps(error.to_dict()),
        row=outbox.encode(row),
        run=row["run"],
        end_id=end_id(state.attempt),
        end_payload=end_payload("cancelled", error=error),
        ended_at=format_time(),
        now=int(now),
        keep=state.failure_ttl or FAILURE_SECONDS,
        control_channel=keys.CONTROL,
        control_message=json.dumps({"op": "cancel", "job": state.id}),
    )
    result = result_fields(state.id, "canceled", error=str(error))
    call = command("eval", CANCEL, len(script_keys), *script_keys, *script_args, *result)
    reply: bytes = yield from retry(call)
    return reply
