"""Waiting for the ends of jobs, and for the result of one."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.api.score_result import ScoreResult
from jobs.api.wire import describe
from jobs.client.cause import cause_of_wait
from jobs.errors import JobError, WaitTimeout, invalid
from jobs.store.connection.protocol import Steps, listen, next_events
from jobs.store.job_state import JobState, Status, read_outcome, read_states, unknown

# Without a message. Then Redis is read again: messages may be lost, and RQ's tools publish none.
SILENCE_SECONDS = 2.0
STATES_AT_ONCE = 500  # jobs whose states are read at once
GOES_ON = "; it is not cancelled, and can be waited for again"  # after the error of a wait


class Ends:
    """Jobs that are waited for. Each end is published; the state in Redis decides. `close` it.

    `deadline`: of a wait that has begun before, and is limited to `timeout` seconds.
    """

    def __init__(
        self, job_ids: Iterable[str], timeout: float | None, deadline: float | None = None
    ) -> None:
        check_timeout(timeout)
        if timeout is not None and deadline is None:
            deadline = time.monotonic() + timeout
        self.deadline = deadline
        self._timeout = timeout
        self._due: deque[str] = deque(dict.fromkeys(job_ids))  # their states must be read
        self._total = len(self._due)
        self._waiting = dict.fromkeys(self._due, Status.UNKNOWN)  # with their last states
        self._jobs = {keys.live(job_id): job_id for job_id in self._due}
        self._mailbox: Any = None

    def next(self) -> Steps[list[JobState]]:
        """The jobs that have ended since the last call, at least one; empty if all have.

        A job that Redis does not know counts as ended. Raises WaitTimeout.
        """
        while self._waiting:
            while self._due:
                ids = [self._due.popleft() for _ in range(min(STATES_AT_ONCE, len(self._due)))]
                ended = yield from self._read([one for one in ids if one in self._waiting])
                if ended:
                    return ended
            left = math.inf if self.deadline is None else self.deadline - time.monotonic()
            if left <= 0:
                raise (yield from self._timed_out())
            if self._mailbox is None:
                names = [keys.live(job_id) for job_id in self._waiting]
                self._mailbox = yield listen(names, ends_only=True)
            events = yield next_events(self._mailbox, left, SILENCE_SECONDS)
            known = {self._jobs.get(event.channel): None for event in events}
            self._due.extend(self._waiting if not events or None in known else filter(None, known))
        return []

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _read(self, ids: list[str]) -> Steps[list[JobState]]:
        """The jobs of `ids` that have ended."""
        states = yield from read_states(ids, self.deadline)
        ended = []
        for job_id, state in states.items():
            if state.status.over or state.status is Status.UNKNOWN:
                del self._waiting[job_id]
                ended.append(state)
            else:
                self._waiting[job_id] = state.status
        return ended

    def _timed_out(self) -> Steps[JobError]:
        job_id, status = next(iter(self._waiting.items()))
        why = yield from cause_of_wait(job_id)
        if self._total == 1:
            return WaitTimeout(
                f"job {job_id} has not ended after {self._timeout:g} s (status: "
                f"{status.value}){why}{GOES_ON}"
            )
        left = len(self._waiting)
        return WaitTimeout(
            f"{left} of {self._total} jobs {'has' if left == 1 else 'have'} not ended after "
            f"{self._timeout:g} s (such as {job_id}; status: {status.value}){why}; they are not "
            "cancelled, and can be waited for again"
        )


def check_timeout(seconds: float | None) -> None:
    """Raises InvalidRequest unless it is a time limit."""
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int | float) or math.isnan(seconds)
    ):
        raise invalid(
            f"timeout: a number of seconds, or None, is needed here; got {describe(seconds)}",
            "timeout",
        )


def wait_for_result(job_id: str, timeout: float | None) -> Steps[ChatCompletion | ScoreResult]:
    """The result of the job, once it has ended.

    Raises JobError: the job's own, or WaitTimeout after `timeout` seconds.
    """
    ends = Ends([job_id], timeout)
    try:
        (state,) = yield from ends.next()
    finally:
        ends.close()
    if state.status is Status.UNKNOWN:
        raise unknown(job_id)
    return (yield from read_outcome(state, ends.deadline))
