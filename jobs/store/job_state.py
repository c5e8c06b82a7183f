"""The state, the request and the outcome of one job, read from RQ's keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.api.score_result import ScoreResult
from jobs.errors import ErrorCode, JobError, invalid
from jobs.operations import Request, operation_named, result_of
from jobs.results.failures import Failure, parse_failures
from jobs.store import rq_layout
from jobs.store.connection.protocol import Steps, command, commands, read_damage, retry
from jobs.store.damage import Damaged
from jobs.store.expiry import FAILURE_SECONDS
from jobs.store.rq_layout import (
    ATTEMPT,
    CHANGING_FIELDS,
    ERROR,
    FAILURES,
    FURTHER_FIELDS,
    ROW,
    integer,
    parse_time,
)
from jobs.store.turns import session_of


class Status(StrEnum):
    """State of a job. Several RQ statuses map to one value."""

    DEFERRED = "deferred"  # waits for other jobs, such as the turns before it in its session
    SCHEDULED = "scheduled"  # waits for its time, or for its next attempt after an error
    QUEUED = "queued"  # waits for a worker, for the first time or again
    STARTED = "started"  # a worker runs it
    FINISHED = "finished"  # has a completion
    FAILED = "failed"  # has an error
    CANCELLED = "cancelled"  # was stopped on request
    UNKNOWN = "unknown"  # never submitted, or its result has expired

    @property
    def over(self) -> bool:
        """True if the job has ended."""
        return self in (Status.FINISHED, Status.FAILED, Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class JobState:
    """The job's hash at one moment. Times are seconds since the epoch."""

    id: str
    status: Status
    attempt: int
    attempt_text: bytes  # as it is in the hash, which others may write to; empty if it is absent
    row_attempt: int | None  # of which the last row is: a requeued job has one before it waits
    error: JobError | None
    # Empty unless read with `full`:
    func: str | None  # on the wire: names the operation
    request: dict[str, Any]
    queue: str
    created_at: float
    enqueued_at: float | None
    failure_ttl: int  # seconds; -1 for ever
    failures: list[Failure]  # of its attempts so far
    failures_text: bytes  # as they are in the hash

    @property
    def tenant(self) -> str | None:
        """The tenant in whose list it waits."""
        options = self.request.get("job")
        tenant = options.get("tenant") if isinstance(options, dict) else None
        return tenant or None


def read_state(
    job_id: str, *, full: bool = False, deadline: float | None = None
) -> Steps[JobState]:
    """The job's state now; `full` also reads what clients seldom need. An absent job is UNKNOWN."""
    fields = CHANGING_FIELDS + FURTHER_FIELDS if full else CHANGING_FIELDS
    values = yield from retry(command("hmget", rq_layout.job_key(job_id), fields), deadline)
    return parse_state(job_id, fields, values)


def read_states(ids: Sequence[str], deadline: float | None = None) -> Steps[dict[str, JobState]]:
    """The states of jobs. One whose key another program has written has failed, with the key, so
    that the others can be waited for."""
    try:
        return (yield from _read_states(ids, deadline))
    except Damaged as error:
        names = {rq_layout.job_key(job_id): job_id for job_id in ids}
        damaged = yield from read_damage(error, list(names), deadline)
        if not damaged:
            raise
    unreadable = {names[one.key]: JobError("internal", str(one)) for one in damaged}
    readable = [job_id for job_id in ids if job_id not in unreadable]
    states = (yield from _read_states(readable, deadline)) if readable else {}
    for job_id, failure in unreadable.items():
        state = parse_state(job_id, ("status",), (b"failed",))
        states[job_id] = replace(state, error=failure)
    return states


def _read_states(ids: Sequence[str], deadline: float | None) -> Steps[dict[str, JobState]]:
    reads = [("hmget", rq_layout.job_key(job_id), CHANGING_FIELDS) for job_id in ids]
    replies = yield from retry(commands(reads), deadline)
    return {
        job_id: parse_state(job_id, CHANGING_FIELDS, values)
        for job_id, values in zip(ids, replies, strict=True)
    }


def read_due(state: JobState, deadline: float | None = None) -> Steps[float | None]:
    """The time of a scheduled job, in seconds since the epoch; None if it is not scheduled now."""
    due: float | None = yield from retry(
        command("zscore", rq_layout.scheduled_key(state.queue), state.id), deadline
    )
    return due


def count_turns_before(state: JobState, deadline: float | None = None) -> Steps[int | None]:
    """Number of open turns before this one in its session; None if it waits for none."""
    session = keys.open_turns(session_of(state.request))
    place: int | None = yield from retry(command("lpos", session, state.id), deadline)
    return place


def count_jobs_before(state: JobState, deadline: float | None = None) -> Steps[int | None]:
    """Number of jobs before this one in its list; None if it does not wait there now."""
    queue, tenant = state.queue, state.tenant
    waiting = keys.tenant_queue(queue, tenant) if tenant else rq_layout.queue_key(queue)
    place: int | None = yield from retry(command("lpos", waiting, state.id), deadline)
    return place


def read_existing(job_id: str) -> Steps[JobState]:
    """The whole state of a job. Raises JobError (not_found) if Redis does not know it."""
    state = yield from read_state(job_id, full=True)
    if state.status is Status.UNKNOWN:
        raise unknown(job_id)
    return state


def parse_state(job_id: str, fields: Sequence[str], values: Sequence[bytes | None]) -> JobState:
    """The state in some fields of the job's hash."""
    found = {name: value for name, value in zip(fields, values, strict=True) if value}
    created_at = parse_time(found.get("created_at"))
    func, request = rq_layout.submitted_call(found.get("data", b""))
    return JobState(
        id=job_id,
        status=Status(rq_layout.read_status(found.get("status"))),
        attempt=max(0, integer(found.get(ATTEMPT), 0)),
        attempt_text=found.get(ATTEMPT, b""),
        row_attempt=integer(found.get(ROW), -1) if ROW in found else None,
        error=_error(found.get(ERROR)),
        func=func,
        request=request,
        queue=found.get("origin", b"").decode("utf-8", "replace"),
        created_at=created_at or 0.0,
        enqueued_at=parse_time(found.get("enqueued_at")) or created_at,
        failure_ttl=integer(found.get("failure_ttl"), FAILURE_SECONDS),
        failures=parse_failures(found.get(FAILURES)),
        failures_text=found.get(FAILURES, b""),
    )


def read_status(job_id: str) -> Steps[Status]:
    """The job's status."""
    state = yield from read_state(job_id)
    return state.status


def read_request(job_id: str) -> Steps[Request]:
    """The request as it was submitted. Raises JobError for an unknown job."""
    state = yield from read_state(job_id, full=True)
    if not state.request:
        raise unknown(job_id)
    return operation_named(state.func).request.parse(state.request)


def read_outcome(
    state: JobState, deadline: float | None = None
) -> Steps[ChatCompletion | ScoreResult]:
    """The result of a job that is over. Raises its JobError if it has none."""
    if state.error is not None and state.status is not Status.FINISHED:
        raise state.error
    newest = command("xrevrange", rq_layout.results_key(state.id), count=1)
    entries = yield from retry(newest, deadline)
    value, failure, peak = None, None, None
    if entries:
        try:
            value, failure = rq_layout.read_result(state.id, *entries[0])
            peak = rq_layout.read_peak(entries[0][1])
        except Exception:  # of RQ, for a result that no worker has written
            raise JobError(
                "internal",
                f"the result of job {state.id} can't be read: another program has written "
                f"{rq_layout.results_key(state.id)}",
            ) from None
    if state.status is Status.CANCELLED:
        raise JobError("cancelled", f"job {state.id} was cancelled")
    if state.status is Status.FAILED:
        raise _foreign_failure(state.id, failure)
    if value is None:
        raise JobError("internal", f"job {state.id} has finished, but its result has expired")
    try:
        result = result_of(value)
    except ValidationError:
        raise JobError(
            "internal", f"job {state.id} has a result that is neither a chat completion nor scores"
        ) from None
    if result.usage is not None and peak is not None:
        result.usage.peak_memory_mb = peak
    return result


def completion_of(job_id: str, result: ChatCompletion | ScoreResult) -> ChatCompletion:
    """The result of a job as a completion. Raises InvalidRequest for that of a scoring job."""
    if not isinstance(result, ChatCompletion):
        raise invalid(f"job {job_id} has scores and no stream: job.result() returns them", "id")
    return result


def unknown(job_id: str) -> JobError:
    """The error of a job that Redis does not know."""
    return JobError(
        "not_found",
        f"no job {job_id!r} in Redis: it was never submitted, or its result has expired",
        "id",
    )


def _foreign_failure(job_id: str, text: str | None) -> JobError:
    """The error of a job that one of RQ's tools failed, instead of a chatjobs worker."""
    lines = (text or "").strip().splitlines()
    reason = lines[-1] if lines else "no reason was recorded"
    code: ErrorCode = "worker_lost" if rq_layout.is_abandoned(reason) else "internal"
    return JobError(code, f"job {job_id} failed: {reason}")


def _error(value: bytes | None) -> JobError | None:
    if not value:
        return None
    try:
        content = json.loads(value)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return JobError("internal", "the job's error in Redis can't be read: it is no JSON object")
    return JobError.from_dict(content)
