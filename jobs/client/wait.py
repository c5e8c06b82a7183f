"""Waiting for the answer of a job."""

from __future__ import annotations

import time

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.client.state import Status, look, outcome, unknown
from jobs.client.steps import Emit, Steps, command, reliably
from jobs.errors import JobError

SLICE_SECONDS = 2.0  # how long one command waits; after it the job's state is read again


def result_steps(job_id: str, timeout: float | None) -> Steps[ChatCompletion]:
    """Emits the completion of the job when it has one.

    Raises JobError: the job's own, or `timeout` after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    key = keys.results(job_id)
    while True:
        # The last result first, then the state: what comes after both wakes us.
        last = yield from reliably(command("xrevrange", key, count=1), deadline)
        state = yield from look(job_id, deadline=deadline)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        if state.status.over:
            completion = yield from outcome(state, deadline)
            yield Emit(completion)
            return
        patience = SLICE_SECONDS
        if deadline is not None:
            patience = min(patience, deadline - time.monotonic())
            if patience <= 0:
                raise JobError(
                    "timeout",
                    f"job {job_id} is still {state.status.value} after {timeout:g} s; it goes on, "
                    "and its result can be asked for again",
                )
        since = last[0][0] if last else "0-0"
        wait = command("xread", {key: since}, block=max(1, int(patience * 1000)))
        yield from reliably(wait, deadline)
