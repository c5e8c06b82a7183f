"""Runs the jobs of a `FakeWorker` step by step, whenever a client or the test lets it advance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from jobs.api.request import ChatRequest
from jobs.errors import JobError, failure_of
from jobs.results.outbox import OutboxEntry
from jobs.testing.answer import Plan, Reply
from jobs.testing.attempts import Attempt, Attempts


@dataclass
class _Running:
    attempt: Attempt
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
        self._retried: dict[str, int] = {}  # by job id
        self._recorded: dict[str, list[OutboxEntry]] = {}  # by run
        self._steps = 0
        self._polled: dict[str, int] = {}  # key of a job: steps when its state was last read
        self._lock = threading.RLock()

    def advance(self) -> float:
        """Take one step. Returns the seconds until the next one is possible: 0 if this one did
        something, infinity if there is nothing to do."""
        with self._lock:
            waiting = self._attempts.waiting()
            now = time.monotonic()
            due = [one for one in self._running if one.due <= now or self._is_cancelled(one)]
            if not waiting and not due:
                dues = [one.due - now for one in self._running]
                return min([*dues, self._attempts.next_due()])
            self._steps += 1
            if waiting:
                for job in waiting:
                    self._start(job)
            else:
                for one in due:
                    self._step(one)
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
        """Take the entries of ended jobs out of Redis, as a recorder does. Returns all so far."""
        with self._lock:
            for run in self._attempts.runs():
                self._recorded.setdefault(run, []).extend(self._attempts.take_entries(run))
            return self._recorded

    def _start(self, job: str) -> None:
        attempt = self._attempts.start(job)
        try:
            attempt = self._attempts.begin(attempt)
            request = ChatRequest.parse(attempt.full_request)
            plan = Plan(request, job, self._reply(request))
        except JobError as error:
            self._attempts.fail(attempt, error)
        except BaseException as error:  # a mistake in the test
            self._attempts.fail(attempt, failure_of(error))
            raise
        else:
            due = time.monotonic() + plan.delay
            self._running.append(_Running(attempt, request, plan, due))

    def _is_cancelled(self, one: _Running) -> bool:
        return self._attempts.is_cancelled(one.attempt)

    def _step(self, one: _Running) -> None:
        plan, attempt = one.plan, one.attempt
        if self._is_cancelled(one):
            self._end(one, JobError("cancelled", f"job {attempt.job} was cancelled"))
        elif one.done < len(plan.steps):
            one.done += 1
            if one.request.publishes:
                self._attempts.write(attempt, one.done, plan.steps[one.done - 1])
        else:
            self._end(one, plan.error)

    def _end(self, one: _Running, error: JobError | None) -> None:
        self._running.remove(one)
        job, retried = one.attempt.job, self._retried.get(one.attempt.job, 0)
        if error is None:
            self._attempts.finish(one.attempt, one.plan.completion)
        elif error.retryable and retried < (one.request.job.retries or 0):
            self._retried[job] = retried + 1
            self._attempts.requeue(one.attempt, error)
        else:
            partial = one.plan.partial(one.done) if one.done else None
            self._attempts.fail(one.attempt, error, partial)
