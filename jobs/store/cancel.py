"""Ending jobs that wait: a client cancels them, a worker ends those whose time to live has passed.

A running job is cancelled by a message to its worker.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from jobs import keys, lua
from jobs.errors import JobError
from jobs.store.job_end import JOB_END_LUA, unanswered
from jobs.store.rq_format import End, deferred_key, scheduled_key
from jobs.store.state import JobState, Status, read_state, unknown
from jobs.store.steps import Steps, command, retry

CANCEL = lua.load("jobs.store", "rq_cancel", JOB_END_LUA)


# KEYS and ARGV of rq_cancel.lua, by name and in order.


class CancelKeys(NamedTuple):
    quarantine: str
    scheduled: str
    deferred: str


class CancelArgs(NamedTuple):
    read_attempt: bytes
    read_failures: bytes
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
    # A job that was requeued has a row of its last attempt: this end is the next one.
    attempt = state.attempt + (state.row_attempt == state.attempt)
    job_end = unanswered(state, error, end, attempt)
    script_keys = CancelKeys(
        quarantine=keys.quarantine(state.queue),
        scheduled=scheduled_key(state.queue),
        deferred=deferred_key(state.queue),
    )
    script_args = CancelArgs(state.attempt_text, state.failures_text, keys.CONTROL, message)
    all_keys = (*script_keys, *job_end.keys)
    call = command("eval", CANCEL, len(all_keys), *all_keys, *script_args, *job_end.args)
    reply: bytes = yield from retry(call)
    return reply
