"""A job read from its hash in Redis.

Producers may be programs in other languages, older versions or hostile: nothing is unpickled or
imported by name, and data that cannot be read becomes a fault that fails only this job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs import keys
from jobs.client.rq_format import (
    CANCEL,
    FAILURE_SECONDS,
    RESULT_SECONDS,
    decode_call,
    integer,
    parse_time,
    request_of,
)
from jobs.errors import JobError, invalid

LOST = "chatjobs_lost"  # field of the job hash: workers that died while they ran it
RETRIED = "chatjobs_retried"  # field of the job hash: retries used after errors

# Fields of a job hash that a worker reads; claim.lua returns them in this order.
FIELDS = ("data", "enqueued_at", "created_at", "result_ttl", "failure_ttl", RETRIED, LOST, CANCEL)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run, end or return one attempt at a job: `member` in RQ's wip set."""

    job: str
    queue: str
    execution: str
    attempt: int

    @property
    def member(self) -> str:
        return f"{self.job}:{self.execution}"


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job taken from its queue. Times are seconds since the epoch."""

    lease: Lease
    func: str | None
    args: Sequence[Any]
    kwargs: dict[str, Any]
    fault: JobError | None  # why its data cannot be read
    claimed_at: float
    enqueued_at: float
    result_ttl: int
    failure_ttl: int
    retried: int
    lost: int  # workers that died while they ran it
    cancelled: bool

    @property
    def request(self) -> dict[str, Any]:
        """The request as submitted; {} if the call has none."""
        return request_of(self.kwargs) or {}


def read(lease: Lease, values: Sequence[bytes | None], claimed_at: float) -> ClaimedJob:
    """The job of a lease from the values of FIELDS. Never raises."""
    fields = dict(zip(FIELDS, values, strict=True))
    func: str | None = None
    args: Sequence[Any] = []
    kwargs: dict[str, Any] = {}
    fault = None
    try:
        func, args, kwargs = decode_call(fields["data"] or b"")
    except ValueError as error:
        fault = invalid(
            f"the job's data cannot be read as JSON: {error}; enqueue {keys.TASK} with the keyword "
            "argument request and RQ's serializer json"
        )
    enqueued_at = parse_time(fields["enqueued_at"]) or parse_time(fields["created_at"])
    return ClaimedJob(
        lease=lease,
        func=func,
        args=args,
        kwargs=kwargs,
        fault=fault,
        claimed_at=claimed_at,
        enqueued_at=enqueued_at or claimed_at,
        result_ttl=integer(fields["result_ttl"], RESULT_SECONDS),
        failure_ttl=integer(fields["failure_ttl"], FAILURE_SECONDS),
        retried=integer(fields[RETRIED], 0),
        lost=integer(fields[LOST], 0),
        cancelled=bool(fields[CANCEL]),
    )
