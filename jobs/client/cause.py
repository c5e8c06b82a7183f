"""Says what a job waits for: for notices of the command line, and for the errors of waits
that time out."""

from __future__ import annotations

import time
from datetime import datetime

from redis import RedisError

from jobs.client.serving import nobody_takes
from jobs.keys import TASKS, model_of
from jobs.operations import CHAT
from jobs.sizes import counted
from jobs.store.connection.protocol import Steps
from jobs.store.job_state import (
    JobState,
    Status,
    count_jobs_before,
    count_turns_before,
    read_due,
    read_state,
)
from jobs.store.turns import session_of
from jobs.store.worker_status import statuses_as_steps


def cause_of_wait(job_id: str) -> Steps[str]:
    """The cause as the end of a sentence, for the error of a wait whose time has passed; empty if
    it is not known."""
    try:
        cause = yield from what_it_waits_for(job_id, "it", time.monotonic())
    except RedisError:  # the error that is raised matters more
        return ""
    return f": {cause}" if cause else ""


def what_it_waits_for(job_id: str, name: str, deadline: float | None = None) -> Steps[str]:
    """A clause about the job that has not started; empty for another one. `name`: its subject. An
    outage is waited out until `deadline`."""
    state = yield from read_state(job_id, full=True, deadline=deadline)
    match state.status:
        case Status.SCHEDULED:
            due = yield from read_due(state, deadline)
            if due is None:  # queued since its state was read
                return ""
            moment = datetime.fromtimestamp(due).astimezone()
            return f"{name} is scheduled for {moment:%Y-%m-%d %H:%M:%S %z}"
        case Status.DEFERRED:
            before = yield from count_turns_before(state, deadline)
            if before is None:
                return f"{name} waits for other jobs"
            turns = counted(before, "other turn")
            return f"{name} waits for {turns} of session {session_of(state.request)!r}"
        case Status.QUEUED:
            return (yield from _place(name, state, deadline))
        case _:
            return ""


def _place(name: str, state: JobState, deadline: float | None) -> Steps[str]:
    """The place of a queued job in its queue, or that no worker serves the queue."""
    workers = yield from statuses_as_steps(deadline)
    # A worker takes a job of any other name, and fails it.
    func = state.func if state.func is not None and TASKS.fullmatch(state.func) else CHAT.func
    model = model_of(state.queue)
    if not workers.serve(model, func):
        return nobody_takes(model, func, workers)
    ahead = yield from count_jobs_before(state, deadline)
    if ahead is None:  # claimed since its state was read
        return ""
    model, tenant = model_of(state.queue), state.tenant
    whose = f" of tenant {tenant!r}" if tenant else ""
    if ahead == 0:
        return f"{name} is the next one{whose} for {model!r}"
    return f"{name} is queued behind {counted(ahead, 'other job')}{whose} for {model!r}"
