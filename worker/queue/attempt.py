"""One attempt at one job: checked when it is claimed, reported when it has ended.

Uses no Redis: attempts.py moves attempts from claim to settlement.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jobs import clock
from jobs.errors import JobError, invalid
from jobs.operations import OPERATIONS, Operation, Request, Result
from jobs.results.failures import Failure
from jobs.sizes import size_text, size_texts
from jobs.store.claimed_job import ClaimedJob, Lease, ran_too_long, waited_too_long
from jobs.store.rq_layout import request_of
from jobs.store.settlement import Settlement, failed_attempts, settlement_of
from jobs.store.turns import History
from worker.backend import Handle, Outcome
from worker.queue.publisher import StreamBuffer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Attempt:
    """A running attempt, from claim to settlement."""

    claimed: ClaimedJob
    operation: Operation
    request: Request
    stream: StreamBuffer
    deadline: float | None  # by jobs.clock
    handle: Handle | None = None
    stop_reason: JobError | None = None  # set if the worker stopped it
    outcome: Outcome | None = None
    breaker_epoch: int = 0  # when it was started
    generated: bool = False  # it has generated something

    @property
    def lease(self) -> Lease:
        return self.claimed.lease

    @property
    def sequences(self) -> int:
        """Number of sequences it adds to the batch."""
        return self.operation.cost(self.request)

    def stop(self, reason: JobError) -> None:
        """Stop the generation. Only the first reason is kept."""
        if self.stop_reason is None:
            self.stop_reason = reason
            if self.handle is not None:
                self.handle.cancel()

    @property
    def overdue(self) -> JobError:
        """The error of an attempt that has passed its deadline."""
        timeout = self.claimed.limits.timeout
        if timeout is not None and self.deadline == self.claimed.claimed_at + timeout:
            return JobError(
                "timeout",
                f"not done within RQ's timeout of {timeout} s (job_timeout): enqueue it again with "
                "a longer one, or with job_timeout=-1",
                "timeout",
            )
        return ran_too_long(self.request.job.ttl)

    @property
    def error(self) -> JobError | None:
        """The error it ended with; if the worker cancelled it, the worker's reason for that."""
        error = self.outcome.error if self.outcome is not None else None
        if error is not None and error.code == "cancelled":
            return self.stop_reason or error
        return error


def make_attempt(claimed: ClaimedJob, models: Collection[str]) -> Attempt:
    """Check a claimed job, whoever submitted it, and make an attempt of it. `models`: the names
    that requests may use. Raises JobError."""
    if claimed.fault is not None:
        raise claimed.fault
    if claimed.cancelled:
        raise JobError("cancelled", f"job {claimed.lease.job} was cancelled")
    operation = OPERATIONS.get(claimed.func or "")
    if operation is None:
        known = ", ".join(OPERATIONS)
        raise invalid(f"this queue runs only {known}, the job names {claimed.func!r}", "func")
    content = request_of(claimed.kwargs)
    if claimed.args or len(claimed.kwargs) != 1 or content is None:
        raise invalid(
            f"{operation.func} takes one keyword argument, request, which is a JSON object",
            "request",
        )
    request = operation.request.parse(_with_history(content, claimed.history))
    request.job.id = claimed.lease.job
    if request.model not in models:
        served = ", ".join(sorted(models))
        raise JobError(
            "model_not_found",
            f"this queue's worker doesn't serve model '{request.model}'; it serves: {served}",
            "model",
        )
    ttl, limits = request.job.ttl, claimed.limits
    deadline: float | None = None
    if ttl is not None:
        left = limits.seconds_to_live  # absent from jobs that RQ's own functions have enqueued
        if left is None:
            left = claimed.enqueued_at + ttl - claimed.redis_ahead - claimed.claimed_at
        deadline = claimed.claimed_at + left
        if clock.now() >= deadline:
            raise waited_too_long(ttl)
    if limits.timeout is not None:
        end = claimed.claimed_at + limits.timeout
        deadline = end if deadline is None else min(deadline, end)
    stream = StreamBuffer(claimed.lease.job, claimed.lease.attempt)
    return Attempt(claimed, operation, request, stream, deadline)


def _with_history(content: dict[str, Any], history: History | None) -> dict[str, Any]:
    """A request with all messages of its session; one whose messages can't be read is unchanged."""
    messages = content.get("messages")
    if history is None or not isinstance(messages, list):
        return content
    return {**content, "messages": [*history.messages, *messages]}


def worker_lost(lease: Lease) -> JobError:
    """The error of a job that is not given to another worker."""
    return JobError(
        "worker_lost",
        f"job {lease.job} was attempted {lease.attempt} times and its last three workers died: it "
        "is not retried; check their logs and this request",
    )


class SettlementBuilder(NamedTuple):
    """Makes the settlements of ended jobs, in the name of one worker."""

    worker: str
    host: str
    provenance: Mapping[str, dict[str, Any]]  # of each model, by its name

    def for_attempt(self, attempt: Attempt, row_bytes: int) -> Settlement:
        """The settlement of an attempt that has an outcome.

        An answer whose row would exceed `row_bytes` loses its log-probabilities. Raises JobError if
        it is too large even so.
        """
        outcome = attempt.outcome or Outcome()
        answer = outcome.result or outcome.partial
        if answer is not None and answer.least_detail_bytes() > row_bytes:
            answer = _without_details(answer, attempt.lease.job, row_bytes)
            outcome = replace(outcome, token_logprobs=[])
        settlement = self._settlement(attempt, outcome, answer)
        if len(settlement.row) > row_bytes and answer is not None:
            answer = _without_details(answer, attempt.lease.job, row_bytes)
            settlement = self._settlement(attempt, replace(outcome, token_logprobs=[]), answer)
        if len(settlement.row) > row_bytes:
            size, most = size_texts(len(settlement.row), row_bytes)
            raise invalid(
                f"the answer is too large for its row: {size}, and the limit (row_bytes) is "
                f"{most}: ask for fewer tokens or choices, or raise the limit (chatjobs limits "
                "row_bytes=N)",
                "max_tokens",
            )
        return settlement

    def _settlement(self, attempt: Attempt, outcome: Outcome, answer: Result | None) -> Settlement:
        sampling = outcome.sampling
        return settlement_of(
            attempt.claimed,
            answer,
            attempt.error,
            worker=self.worker,
            started_at=outcome.started_at,
            first_token_at=outcome.first_token_at,
            finished_at=outcome.finished_at,
            prompt_token_ids=outcome.prompt_token_ids,
            output_token_ids=outcome.output_token_ids,
            token_logprobs=outcome.token_logprobs,
            details=[one.to_dict() for one in outcome.details],
            sampling=sampling.to_dict() if sampling else None,
            seed=outcome.seed,
            host=self.host,
            provenance=self.provenance[attempt.request.model],
        )

    def failures(self, claimed: ClaimedJob, error: JobError) -> Sequence[Failure]:
        """The failed attempts at a job, with this one, which ended with an error."""
        return failed_attempts(claimed, error, self.worker)

    def for_error(
        self, claimed: ClaimedJob, error: JobError, failures: Sequence[Failure] | None = None
    ) -> Settlement:
        """The settlement of a job that is not run, or not run again. `failures`: its failed
        attempts; None: those before, and this one."""
        return settlement_of(
            claimed, None, error, worker=self.worker, host=self.host, failures=failures
        )


def _without_details(answer: Result, job: str, row_bytes: int) -> Result:
    logger.warning(
        "job %s: its row would exceed %s (row_bytes) and has no log-probabilities",
        job,
        size_text(row_bytes),
    )
    return answer.without_details()
