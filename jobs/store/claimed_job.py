"""A job read from its hash in Redis.

Producers may be programs in other languages, older versions or hostile: nothing is unpickled or
imported by name, and data that cannot be read becomes a fault that fails only this job.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs import keys
from jobs.errors import JobError, invalid
from jobs.operations import CHAT
from jobs.results.failures import Failure, parse_failures
from jobs.store.enqueue_errors import too_large
from jobs.store.expiry import FAILURE_SECONDS, RESULT_SECONDS
from jobs.store.limits import Limits
from jobs.store.rq_layout import (
    CANCEL,
    DEADLINE,
    FAILURES,
    GROUP,
    MACHINE_ERRORS,
    RETRIED,
    Call,
    decode_call,
    integer,
    parse_time,
    request_of,
)
from jobs.store.turns import History

MAX_GROWTH = 12  # bytes that one byte of JSON has at most when it is encoded again as ASCII
MAX_INTERVAL = 10 * 365 * 86_400  # seconds that a retry may wait
_BY_NAME = (
    "chat workers call no functions that a job names: let a job with depends_on follow it instead"
)


# RQ's options that chat workers don't have, by the field of the job hash: their names, and why.
UNSUPPORTED = {
    "success_callback_name": ("on_success", _BY_NAME),
    "failure_callback_name": ("on_failure", _BY_NAME),
    "stopped_callback_name": ("on_stopped", _BY_NAME),
    "repeats_left": (
        "repeat",
        "a chat job has one result and one row: enqueue a new job each time",
    ),
    "webhooks": (
        "webhooks",
        "chat workers send nothing to other servers: let a job with depends_on do that",
    ),
}


# Fields of a job hash that a worker reads: those of the job,
_OF_JOB = (
    *("data", "enqueued_at", "created_at", "result_ttl", "failure_ttl", RETRIED, GROUP, CANCEL),
    *UNSUPPORTED,
)


# and those of its limits.
_OF_TERMS = (
    *(DEADLINE, "timeout", "retries_left", "retry_intervals", "enqueue_at_front_on_retry"),
    *(FAILURES, MACHINE_ERRORS),
)
FIELDS = (*_OF_JOB, *_OF_TERMS)


def waited_too_long(ttl: Any) -> JobError:
    """The error of a job whose ttl, in seconds, has passed before a worker took it."""
    return JobError(
        "timeout",
        f"waited longer than its ttl of {_number(ttl)} s (job.ttl): submit it again with a longer "
        "one, or start more workers",
        "job.ttl",
    )


def ran_too_long(ttl: Any) -> JobError:
    """The error of a job whose ttl, in seconds, has passed while it ran."""
    return JobError(
        "timeout",
        f"not done within its ttl of {_number(ttl)} s (job.ttl), which counts from when it was "
        "queued: submit it again with a longer one, or start more workers",
        "job.ttl",
    )


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


@dataclass(frozen=True, slots=True)
class ExecutionLimits:
    """Time limits and retries of a job, from now on, and the attempts that have failed."""

    seconds_to_live: float | None = None  # until its ttl has passed, by the clock of Redis
    timeout: int | None = None  # RQ's: seconds that an attempt may take
    retries: int = 0  # RQ's: after any error
    intervals: tuple[float, ...] = ()  # RQ's: seconds before its retries
    front: bool = False  # RQ's: its retries go to the front of the queue
    failures: tuple[Failure, ...] = ()
    machine_errors: int = 0  # attempts that ended because of their worker's machine

    def interval(self, retried: int) -> float | None:
        """Seconds before the next retry of a job that was retried so many times, by RQ's rule
        (rq/job.py, get_retry_interval). None if RQ says nothing about it."""
        left = self.retries - retried
        if left <= 0 or not self.intervals:
            return None
        return self.intervals[max(len(self.intervals) - left, 0)]


def _read_limits(values: Sequence[bytes | None], now: float) -> ExecutionLimits:
    """The limits from the values of their fields. `now`: the time of Redis. Never raises."""
    deadline, timeout, retries, intervals, front, failures, machine_errors = values
    is_time = deadline is not None and deadline.isdigit() and len(deadline) < 17
    milliseconds = int(deadline or 0) if is_time else None
    seconds = integer(timeout, -1)
    return ExecutionLimits(
        seconds_to_live=None if milliseconds is None else milliseconds / 1000 - now,
        timeout=seconds if seconds > 0 else None,
        retries=max(0, integer(retries, 0)),
        intervals=_intervals(intervals),
        front=integer(front, 0) == 1,
        failures=tuple(parse_failures(failures)),
        machine_errors=max(0, integer(machine_errors, 0)),
    )


def _intervals(value: bytes | None) -> tuple[float, ...]:
    """RQ's list of seconds; empty if it cannot be read."""
    try:
        found = json.loads(value or b"[]")
    except (ValueError, RecursionError):
        return ()
    numbers = found if isinstance(found, list) else []
    return tuple(
        float(one) for one in numbers if isinstance(one, int | float) and 0 <= one <= MAX_INTERVAL
    )


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run, end or return one attempt at a job: `member` in RQ's wip set.

    The execution identifies the attempt. Its number is also a field of the job's hash, which other
    programs may change or delete while the job runs.
    """

    job: str
    queue: str
    execution: str
    attempt: int = field(compare=False)

    @property
    def member(self) -> str:
        return f"{self.job}:{self.execution}"

    @property
    def entry(self) -> str:
        """Member of the set of jobs that a worker has started."""
        return f"{self.execution} {self.job} {self.queue}"


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job taken from its queue. Times are seconds since the epoch: `claimed_at` by jobs.clock,
    the others by the clock of Redis or of the producer."""

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
    suspect: bool  # it may have killed its workers, and runs with its group only
    cancelled: bool
    row_bytes: int  # limit of its row
    limits: ExecutionLimits = ExecutionLimits()
    redis_ahead: float = 0.0  # seconds that the clock of Redis was ahead of this process's
    history: History | None = None  # of its session

    @property
    def request(self) -> dict[str, Any]:
        """The request as submitted; {} if the call has none."""
        return request_of(self.kwargs) or {}

    def belongs_to_others(self, funcs: Collection[str]) -> bool:
        """True if only other workers run its function, since this one runs `funcs`. One that was
        cancelled ends here: no such worker may come."""
        is_task = self.func is not None and keys.TASKS.fullmatch(self.func) is not None
        return is_task and self.func not in funcs and not self.cancelled


def read(
    lease: Lease,
    values: Sequence[bytes | None],
    claimed_at: float,
    limits: Limits,
    now: float,
) -> ClaimedJob:
    """The job of a lease from the values of FIELDS. `now`: the time of Redis. Never raises."""
    fields = dict(zip(FIELDS, values, strict=True))
    redis_ahead = now - claimed_at
    call = Call(None, [], {}, 0)
    fault: JobError | None = None
    try:
        call = decode_call(fields["data"] or b"")
    except ValueError as error:
        fault = invalid(
            f"the job's data cannot be read as JSON: {error}; enqueue {CHAT.func} with the keyword "
            "argument request and RQ's serializer json"
        )
    fault = fault or _unsupported(fields) or _excess(call, limits)
    enqueued_at = parse_time(fields["enqueued_at"]) or parse_time(fields["created_at"])
    return ClaimedJob(
        lease=lease,
        func=call.func,
        args=call.args,
        kwargs=call.kwargs,
        fault=fault,
        claimed_at=claimed_at,
        enqueued_at=enqueued_at or claimed_at + redis_ahead,
        result_ttl=integer(fields["result_ttl"], RESULT_SECONDS),
        failure_ttl=integer(fields["failure_ttl"], FAILURE_SECONDS),
        retried=integer(fields[RETRIED], 0),
        suspect=bool(fields[GROUP]),
        cancelled=bool(fields[CANCEL]),
        row_bytes=limits.row_bytes,
        limits=_read_limits(values[len(_OF_JOB) :], now),
        redis_ahead=redis_ahead,
    )


def _unsupported(fields: Mapping[str, bytes | None]) -> JobError | None:
    """The error of a job with an option of RQ that would be ignored silently."""
    for name, (option, reason) in UNSUPPORTED.items():
        if fields[name] not in (None, b"", b"0", b"[]"):
            return invalid(f"the job has RQ's option {option}, but {reason}", option)
    return None


def _excess(call: Call, limits: Limits) -> JobError | None:
    """The error of a request that exceeds the limits of requests, whoever enqueued it. Only one
    that may exceed them is encoded again."""
    if MAX_GROWTH * call.size <= min(limits.request_bytes, limits.message_bytes):
        return None
    request = request_of(call.kwargs) or {}
    size = len(json.dumps(request))
    if size > limits.request_bytes:
        return too_large("request_bytes", size, limits.request_bytes)
    messages = request.get("messages")
    sizes = [len(json.dumps(one)) for one in messages] if isinstance(messages, list) else []
    if max(sizes, default=0) > limits.message_bytes:
        return too_large("message_bytes", max(sizes), limits.message_bytes)
    return None
