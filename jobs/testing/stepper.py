"""Runs the jobs of a `FakeWorker` step by step, whenever a client or the test lets it advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from jobs.api.request import ChatRequest
from jobs.errors import JobError, failure_of, invalid
from jobs.operations import CHAT, operation_named
from jobs.results.outbox import OutboxEntry
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.testing.attempts import Attempts
from jobs.testing.replies import Plan, Reply


@dataclass
class _Running:
    job: ClaimedJob
    request: ChatRequest
    plan: Plan
    due: float  # of time.monotonic
    done: int = 0  # steps


class Stepper:
    """The jobs that run. In one step it starts all jobs that wait, or gives each running job its
    next token; a job that has all its tokens ends. May be shared by threads."""

    def __init__(self, redis: Redis, reply: Callable[[ChatRequest], Reply]) -> None:
        self._attempts = Attempts(redis)
        self._reply = reply
        self._running: list[_Running] = []
        self._recorded: dict[str, list[OutboxEntry]] = {}  # by run
        self._steps = 0
        self._polled: dict[str, int] = {}  # key of a job: steps when its state was last read
        self._lock = threading.RLock()

    def advance(self) -> float:
        """Take one step. Returns the seconds until the next one is possible: 0 if this one did
        something, infinity if there is nothing to do."""
        with self._lock:
            claimed = self._attempts.claim()
            if claimed:
                self._steps += 1
                for job in claimed:
                    self._start(job)
                return 0.0
            now = time.monotonic()
            stopped = self._stopped()
            due = [one for one in self._running if one.due <= now or one.job.lease in stopped]
            if not due:
                dues = [one.due - now for one in self._running]
                return min([*dues, self._attempts.next_due()])
            self._steps += 1
            for one in due:
                self._step(one, stopped=one.job.lease in stopped)
            return 0.0

    def poll(self, key: str) -> None:
        """Advance if the state of this job is read again and nothing has happened in between, so
        that a loop that polls it ends."""
        with self._lock:
            if self._polled.get(key) == self._steps:
                self.advance()
            else:
                self._polled[key] = self._steps

    def record(self) -> dict[str, list[OutboxEntry]]:
        """Take the entries of ended jobs out of Redis, as a recorder does. Returns all so far, by
        run."""
        with self._lock:
            for entry in self._attempts.take_rows():
                self._recorded.setdefault(entry["run"], []).append(entry)
            return self._recorded

    def _start(self, job: ClaimedJob) -> None:
        try:
            request = self._request_of(job)
            plan = Plan(request, job.lease.job, self._reply(request))
        except JobError as error:
            self._attempts.fail(job, error)
        except BaseException as error:  # a mistake in the test
            self._attempts.fail(job, failure_of(error))
            raise
        else:
            due = time.monotonic() + plan.delay
            self._running.append(_Running(job, request, plan, due))

    def _request_of(self, job: ClaimedJob) -> ChatRequest:
        """The request with all messages of its session. Raises JobError."""
        if job.fault is not None:
            raise job.fault
        if job.cancelled:
            raise _cancelled(job)
        operation = operation_named(job.func)
        if operation is not CHAT:
            raise invalid(f"a FakeWorker answers chat jobs, and this is a {operation.title} job")
        if job.history is None:
            return ChatRequest.parse(job.request)
        messages = [*job.history.messages, *job.request["messages"]]
        return ChatRequest.parse({**job.request, "messages": messages})

    def _stopped(self) -> set[Lease]:
        """The leases of the running jobs that clients have cancelled."""
        jobs = [one.job for one in self._running]
        found = zip(jobs, self._attempts.cancelled(jobs), strict=True)
        return {job.lease for job, cancelled in found if cancelled}

    def _step(self, one: _Running, *, stopped: bool) -> None:
        plan = one.plan
        if stopped:
            self._end(one, _cancelled(one.job))
        elif one.done < len(plan.steps):
            one.done += 1
            if one.request.publishes:
                self._attempts.write(one.job, one.done, plan.steps[one.done - 1])
        else:
            self._end(one, plan.error)

    def _end(self, one: _Running, error: JobError | None) -> None:
        self._running.remove(one)
        if error is None:
            self._attempts.finish(one.job, one.plan.completion)
            return
        allowed = (one.request.job.retries or 0) if error.retryable else 0
        if one.job.retried >= allowed or not self._attempts.retry(one.job, allowed, error):
            partial = one.plan.partial(one.done) if one.done else None
            self._attempts.fail(one.job, error, partial)


def _cancelled(job: ClaimedJob) -> JobError:
    return JobError("cancelled", f"job {job.lease.job} was cancelled")
