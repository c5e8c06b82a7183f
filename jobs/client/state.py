"""What Redis knows about one job: its state, its request and how it ended, read from RQ's keys."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pydantic import ValidationError
from rq.job import Job as RQJob
from rq.results import Result
from rq.serializers import JSONSerializer

from jobs import keys
from jobs.api.answer import ChatCompletion
from jobs.client.steps import Ask, command, reliably
from jobs.errors import JobError, invalid

# Fields that we add to RQ's job hash.
ERROR = "chatjobs_error"  # JobError.to_dict() as JSON, of a failed or cancelled job
ATTEMPT = "chatjobs_attempt"  # executions so far
CANCEL = "chatjobs_cancel"  # 1: a running job shall stop


class Status(StrEnum):
    """Where a job is. RQ's finer states are folded into these."""

    QUEUED = "queued"  # waits for a worker, for the first time or again
    STARTED = "started"  # a worker has it
    FINISHED = "finished"  # has a completion
    FAILED = "failed"  # has an error
    CANCELLED = "cancelled"  # was stopped on request
    UNKNOWN = "unknown"  # never submitted, or its answer has expired

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to the job by itself."""
        return self in (Status.FINISHED, Status.FAILED, Status.CANCELLED)


_FROM_RQ = {
    "created": Status.QUEUED,
    "queued": Status.QUEUED,
    "deferred": Status.QUEUED,
    "scheduled": Status.QUEUED,
    "started": Status.STARTED,
    "finished": Status.FINISHED,
    "failed": Status.FAILED,
    "stopped": Status.CANCELLED,
    "canceled": Status.CANCELLED,
}

_CHANGING = ("status", ATTEMPT, ERROR)
_FIXED = ("data", "origin", "created_at", "enqueued_at", "failure_ttl")


@dataclass(frozen=True, slots=True)
class JobState:
    """A look at the job's hash. Times are seconds since the epoch."""

    id: str
    status: Status
    attempt: int
    error: JobError | None
    # Only in a full look:
    request: dict[str, Any]
    queue: str
    created_at: float
    enqueued_at: float | None
    failure_ttl: int | None


def look(job_id: str, *, full: bool = False, deadline: float | None = None) -> Ask[JobState]:
    """The job's state now; `full` also reads what never changes. An absent job is UNKNOWN."""
    fields = _CHANGING + _FIXED if full else _CHANGING
    step = command("hmget", RQJob.key_for(job_id), fields)
    values = yield from reliably(step, deadline)
    found = {name: value for name, value in zip(fields, values, strict=True) if value}
    created = _seconds(found.get("created_at"))
    return JobState(
        id=job_id,
        status=_FROM_RQ.get(found.get("status", b"").decode(), Status.UNKNOWN),
        attempt=int(found.get(ATTEMPT, 0)),
        error=_error(found.get(ERROR)),
        request=_request(found.get("data")),
        queue=found.get("origin", b"").decode(),
        created_at=created or 0.0,
        enqueued_at=_seconds(found.get("enqueued_at")) or created,
        failure_ttl=int(found["failure_ttl"]) if "failure_ttl" in found else None,
    )


def outcome(state: JobState, deadline: float | None = None) -> Ask[ChatCompletion]:
    """The completion of a job that is over. Raises its JobError if it has none."""
    if state.error is not None and state.status is not Status.FINISHED:
        raise state.error
    step = command("xrevrange", keys.results(state.id), count=1)
    entries = yield from reliably(step, deadline)
    result = None
    if entries:
        result_id, payload = entries[0]
        result = Result.restore(
            state.id,
            result_id.decode(),
            payload,
            connection=None,  # type: ignore[arg-type]
            serializer=JSONSerializer,
        )
    if state.status is Status.CANCELLED:
        raise JobError("cancelled", f"job {state.id} was cancelled")
    if state.status is Status.FAILED:
        raise _foreign_failure(state.id, result.exc_string if result else None)
    if result is None or result.return_value is None:
        raise JobError("internal", f"job {state.id} has finished, but its answer has expired")
    try:
        return ChatCompletion.model_validate(result.return_value)
    except ValidationError:
        raise JobError(
            "internal", f"job {state.id} has a result that is no chat completion"
        ) from None


def unknown(job_id: str) -> JobError:
    return invalid(
        f"no job {job_id!r} in Redis: it was never submitted, or its answer has expired", "id"
    )


def _foreign_failure(job_id: str, text: str | None) -> JobError:
    """The error of a job that was not failed by a worker of ours, but by one of RQ's tools."""
    lines = (text or "").strip().splitlines()
    reason = lines[-1] if lines else "no reason was kept"
    code = "worker_lost" if "AbandonedJobError" in reason else "internal"
    return JobError(code, f"job {job_id} failed: {reason}")  # type: ignore[arg-type]


def _error(value: bytes | None) -> JobError | None:
    return JobError.from_dict(json.loads(value)) if value else None


def _request(data: bytes | None) -> dict[str, Any]:
    """The keyword argument `request` of the job's call; {} if the call has none."""
    if not data:
        return {}
    try:
        text = zlib.decompress(data)
    except zlib.error:  # RQ takes both
        text = data
    try:
        _, _, _, kwargs = json.loads(text)
        request = kwargs["request"]
    except (ValueError, TypeError, KeyError):
        return {}
    return request if isinstance(request, dict) else {}


def _seconds(value: bytes | None) -> float | None:
    """RQ's time format to seconds since the epoch."""
    if not value:
        return None
    try:
        moment = datetime.fromisoformat(value.decode())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
