"""A job as its hash in Redis has it, read so that nothing in it can hurt the worker.

Anybody may write a job hash: another language, an older version, somebody with bad intent. Nothing
is unpickled or imported by name here, and what can't be read becomes a fault that fails the job.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from jobs import keys
from jobs.client.submit import FAILURE_SECONDS, RESULT_SECONDS
from jobs.errors import JobError, invalid
from worker.queue.lua import FIELDS, LOST, RETRIED

MAX_DATA = 64 * 2**20  # bytes of a job's data, unpacked
MAX_DEPTH = 100  # of nested JSON; what reads and writes it gives up somewhat later


@dataclass(frozen=True, slots=True)
class Lease:
    """One attempt at a job: the entry in RQ's books that makes it ours."""

    job: str
    queue: str
    execution: str
    attempt: int

    @property
    def member(self) -> str:
        return f"{self.job}:{self.execution}"


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that was taken from its queue. Times are seconds since the epoch."""

    lease: Lease
    func: str | None
    args: Sequence[Any]
    kwargs: dict[str, Any]
    fault: JobError | None  # why its data can't be read
    claimed_at: float
    enqueued_at: float
    result_ttl: int
    failure_ttl: int
    retried: int
    lost: int  # workers that died with it
    cancelled: bool

    @property
    def request(self) -> dict[str, Any]:
        """The request as it was submitted; {} if the call has none."""
        request = self.kwargs.get("request")
        return request if isinstance(request, dict) else {}


def read(lease: Lease, values: Sequence[bytes | None], moment: float) -> ClaimedJob:
    """The job of a lease from the values of `worker.queue.lua.FIELDS`. Never raises."""
    fields = dict(zip(FIELDS, values, strict=True))
    func: str | None = None
    args: Sequence[Any] = []
    kwargs: dict[str, Any] = {}
    fault = None
    try:
        func, args, kwargs = decode_call(fields["data"] or b"")
    except ValueError as error:
        fault = invalid(
            f"the job's data is not what RQ's JSON serializer writes ({error}): enqueue "
            f"{keys.TASK} with the keyword argument request, serializer json"
        )
    enqueued = _moment(fields["enqueued_at"]) or _moment(fields["created_at"])
    return ClaimedJob(
        lease=lease,
        func=func,
        args=args,
        kwargs=kwargs,
        fault=fault,
        claimed_at=moment,
        enqueued_at=enqueued or moment,
        result_ttl=_integer(fields["result_ttl"], RESULT_SECONDS),
        failure_ttl=_integer(fields["failure_ttl"], FAILURE_SECONDS),
        retried=_integer(fields[RETRIED], 0),
        lost=_integer(fields[LOST], 0),
        cancelled=bool(fields[FIELDS[-1]]),
    )


def decode_call(data: bytes) -> tuple[str | None, Sequence[Any], dict[str, Any]]:
    """Function name, args and kwargs of a job's data, JSON only. Raises ValueError."""
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(data, MAX_DATA)
        rest = unpack.unconsumed_tail
    except zlib.error:  # RQ takes both
        text, rest = data[:MAX_DATA], data[MAX_DATA:]
    if rest:
        raise ValueError(f"it is larger than {MAX_DATA} bytes")
    try:
        call = json.loads(text.decode())
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(call, list) or len(call) != 4:
        raise ValueError("it is not a list of four")
    if _deeper_than(call, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    func, instance, args, kwargs = call
    if instance is not None or not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("it is not a call of a plain function")
    return func if isinstance(func, str) else None, args, kwargs


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _moment(value: bytes | None) -> float | None:
    """RQ's time format → seconds since the epoch."""
    try:
        moment = datetime.fromisoformat((value or b"").decode())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _integer(value: bytes | None, default: int) -> int:
    """A time to live in seconds, or a count; what Redis could not take becomes the default."""
    try:
        number = default if value is None else int(value)
    except ValueError:
        return default
    return number if -1 <= number < 2**31 else default
