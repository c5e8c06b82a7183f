"""The end of a claimed job with its row, as whoever ran it reports it. job_end.py writes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

from jobs import clock
from jobs.api.answer import ChatCompletion, FinishReason
from jobs.api.conversation import Turn, ended_turn
from jobs.encoding import to_json
from jobs.errors import JobError
from jobs.operations import Result, operation_named
from jobs.results import outbox
from jobs.results.failures import Failure, add_failure, failure
from jobs.store.claimed_job import ClaimedJob, Lease
from jobs.store.rq_layout import End


class Answer(NamedTuple):
    """The result of a job, as RQ's result and the end of its token stream have it."""

    text: str  # JSON
    finish_reason: FinishReason
    usage: dict[str, Any] | None  # JSON form of `Usage`
    peak_memory_mb: int | None = None  # of the usage; beside `text`, not in it


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a job: the values for RQ's keys, the outbox and the token stream."""

    claimed: ClaimedJob
    run: str
    row: str  # outbox.encode(…)
    answer: Answer | None
    error: JobError | None
    failures: Sequence[Failure]
    turn: Turn | None = None  # of the job's session

    @property
    def lease(self) -> Lease:
        return self.claimed.lease

    @property
    def status(self) -> End:
        if self.answer is not None:
            return "finished"
        if self.error is not None and self.error.code == "cancelled":
            return "canceled"
        return "failed"


class Generated(TypedDict, total=False):
    """The fields of a row about the generation, as in `OutboxEntry`."""

    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[Sequence[int]]
    token_logprobs: Sequence[Sequence[float]]
    details: Sequence[dict[str, Any]]
    sampling: dict[str, Any] | None
    seed: int | None
    host: str | None
    provenance: dict[str, Any] | None


def settlement_of(
    claimed: ClaimedJob,
    answer: Result | None,
    error: JobError | None,
    *,
    worker: str,
    failures: Sequence[Failure] | None = None,
    started_at: float | None = None,
    first_token_at: float | None = None,
    finished_at: float | None = None,
    **generated: Unpack[Generated],
) -> Settlement:
    """The settlement of a job that has ended with an answer or an error; with both, the answer is
    what it had generated until then. Times are those of jobs.clock; `finished_at` is now unless it
    is given. `failures`: the failed attempts; None: those before, and this one."""
    if failures is None:
        failures = failed_attempts(claimed, error, worker)
    content = answer.to_dict() if answer is not None else None
    usage = content.get("usage") if content is not None else None
    # Clients of 0.2.0 refuse a completion with a field that they do not know; later ones ignore it.
    peak = usage.pop("peak_memory_mb", None) if usage is not None else None
    entry = outbox.outbox_entry(
        claimed.lease.job,
        claimed.request,
        _row_status(error),
        operation=operation_named(claimed.func).name,
        attempt=claimed.lease.attempt,
        completion=content,
        error=error.to_dict() if error is not None else None,
        failures=failures,
        enqueued_at=claimed.enqueued_at,
        started_at=_by_redis(claimed, started_at),
        first_token_at=_by_redis(claimed, first_token_at),
        finished_at=_by_redis(claimed, finished_at or clock.now()),
        worker=worker,
        peak_memory_mb=peak,
        **generated,
    )
    text = to_json(content)
    is_whole = content is not None and entry["completion"] is content  # else without content
    result: Answer | None = None
    if answer is not None and error is None:
        result = Answer(text, answer.finish_reason, usage, peak)
    return Settlement(
        claimed=claimed,
        run=entry["run"],
        row=outbox.encode(entry, text if is_whole else None),
        answer=result,
        error=error,
        failures=failures,
        turn=_turn_of(claimed, answer, error),
    )


def failed_attempts(claimed: ClaimedJob, error: JobError | None, worker: str) -> Sequence[Failure]:
    """The failed attempts at a job, this one included if it ended with an error."""
    before = claimed.limits.failures
    if error is None or error.code == "cancelled":
        return before
    return add_failure(before, failure(claimed.lease.attempt, time.time(), worker, error))


def _row_status(error: JobError | None) -> outbox.Status:
    if error is None:
        return "ok"
    return "cancelled" if error.code == "cancelled" else "error"


def _turn_of(claimed: ClaimedJob, answer: Result | None, error: JobError | None) -> Turn | None:
    """The turn that a job appends to its session. An answer that was stopped is a turn as far as it
    got; one that failed is none."""
    if claimed.history is None or not isinstance(answer, ChatCompletion):
        return None
    if error is not None and error.code not in ("cancelled", "timeout"):
        return None
    messages = claimed.request["messages"]
    return ended_turn(messages, answer, cancelled=error is not None, job=claimed.lease.job)


def _by_redis(claimed: ClaimedJob, time: float | None) -> float | None:
    """A time of jobs.clock by the clock of Redis, which all workers share."""
    return None if time is None else time + claimed.redis_ahead
