"""Cancelling a job: at once while it is queued, by a message to its worker while it runs."""

from __future__ import annotations

import json
import time
from typing import Any

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
    script_keys = [
        job_key(state.id),
        queue_key(state.queue),
        registry_key(state.queue, "canceled"),
        keys.log(state.id),
        keys.live(state.id),
        results_key(state.id),
        keys.outbox(row["run"]),
        keys.OUTBOXES,
    ]
    script_args: list[Any] = [
        state.id,
        state.attempt,
        json.dumps(error.to_dict()),
        outbox.encode(row),
        row["run"],
        end_id(state.attempt),
        end_payload("cancelled", error=error),
        format_time(),
        int(now),
        state.failure_ttl or FAILURE_SECONDS,
        keys.CONTROL,
        json.dumps({"op": "cancel", "job": state.id}),
        *result_fields(state.id, "canceled", error=str(error)),
    ]
    call = command("eval", CANCEL, len(script_keys), *script_keys, *script_args)
    reply: bytes = yield from retry(call)
    return reply
