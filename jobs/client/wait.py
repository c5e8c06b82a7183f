"""Waiting for the result of a job."""

from __future__ import annotations

import time

from jobs.api.answer import ChatCompletion
from jobs.client.rq_format import results_key
from jobs.client.state import Status, read_outcome, read_state, unknown
from jobs.client.steps import Steps, command, retry
from jobs.errors import JobError

BLOCK_SECONDS = 2.0  # how long one XREAD waits before the job's state is read again


def wait_for_result(job_id: str, timeout: float | None) -> Steps[ChatCompletion]:
    """The completion of the job, once it has ended.

    Raises JobError: the job's own, or `timeout` after `timeout` seconds.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    results = results_key(job_id)
    while True:
        # The newest result is read before the state: XREAD then returns for any later result.
        newest = yield from retry(command("xrevrange", results, count=1), deadline)
        state = yield from read_state(job_id, deadline=deadline)
        if state.status is Status.UNKNOWN:
            raise unknown(job_id)
        if state.status.over:
            return (yield from read_outcome(state, deadline))
        seconds = BLOCK_SECONDS
        if deadline is not None:
            seconds = min(seconds, deadline - time.monotonic())
            if seconds <= 0:
                raise JobError(
                    "timeout",
                    f"job {job_id} has not ended after {timeout:g} s (status: "
                    f"{state.status.value}); it is not cancelled, and its result can be requested "
                    "again",
                )
        since = newest[0][0] if newest else "0-0"
        wait = command("xread", {results: since}, block=max(1, int(seconds * 1000)))
        yield from retry(wait, deadline)
