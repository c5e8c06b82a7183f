"""Finds in Redis what a job waits for: for notices of the command line, and for the errors of waits
that time out."""

from __future__ import annotations

from datetime import datetime

from redis import RedisError

from jobs import keys
from jobs.client.serving import Published, nobody_takes, read_values, worker_keys
from jobs.sizes import counted
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.job_state import Status, read_state
from jobs.store.rq_layout import queue_key, scheduled_key
from jobs.store.turns import session_of


def cause_of_wait(job_id: str) -> Steps[str]:
    """The cause as the end of a sentence, for an error; empty if it is not known."""
    try:
        cause = yield from what_it_waits_for(job_id, "it")
    except RedisError:  # the error that is raised matters more
        return ""
    return f": {cause}" if cause else ""


def what_it_waits_for(job_id: str, name: str) -> Steps[str]:
    """A clause about the job that has not started; empty for another one. `name`: its subject."""
    state = yield from read_state(job_id, full=True)
    match state.status:
        case Status.SCHEDULED:
            due = yield from retry(command("zscore", scheduled_key(state.queue), job_id))
            if due is None:  # queued since its state was read
                return ""
            moment = datetime.fromtimestamp(due).astimezone()
            return f"{name} is scheduled for {moment:%Y-%m-%d %H:%M:%S %z}"
        case Status.DEFERRED:
            session = session_of(state.request)
            before = yield from retry(command("lpos", keys.open_turns(session), job_id))
            if not isinstance(before, int):
                return f"{name} waits for other jobs"
            turns = counted(before, "other turn")
            return f"{name} waits for {turns} of session {session!r}"
        case Status.QUEUED:
            return (yield from _place(job_id, name, state.queue, state.request.get("job")))
        case _:
            return ""


def _read_workers() -> Steps[Published]:
    """The workers that run, and those that load their models."""
    names = yield from retry(command("zrange", keys.WORKERS, 0, -1))
    found = worker_keys(names)
    values = (yield from retry(command("mget", found))) if found else []
    return read_values(values)


def _place(job_id: str, name: str, queue: str, options: object) -> Steps[str]:
    """The place of a queued job in its queue, or that no worker serves the queue."""
    model = keys.model_of(queue)
    workers = yield from _read_workers()
    if not workers.serve(queue):
        return nobody_takes(queue, workers)
    tenant = options.get("tenant") if isinstance(options, dict) else None
    waiting = keys.tenant_queue(queue, tenant) if tenant else queue_key(queue)
    ahead = yield from retry(command("lpos", waiting, job_id))
    if not isinstance(ahead, int):  # claimed since its state was read
        return ""
    whose = f" of tenant {tenant!r}" if tenant else ""
    if ahead == 0:
        return f"{name} is the next one{whose} for {model!r}"
    return f"{name} is queued behind {counted(ahead, 'other job')}{whose} for {model!r}"
