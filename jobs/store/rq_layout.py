"""RQ's layout in Redis: key names, job hashes, times and results.

It follows RQ 2.12: job hashes are defined in rq/job.py, results in rq/results.py, registries in
rq/registry.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, NamedTuple

from redis import Redis
from rq import Queue
from rq.exceptions import AbandonedJobError
from rq.job import Job
from rq.registry import (
    BaseRegistry,
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from rq.utils import now, utcformat

from jobs.encoding import JSONText, from_json

DATA = "data"  # RQ's field of a job hash: the call, serialised and compressed
COMPRESSION = 1  # level of zlib; higher ones are slower and not much smaller for JSON
UNCOMPRESSED = 512  # bytes up to which compression takes longer than all else, and gains little

# Fields that chatjobs adds to RQ's job hash.
ERROR = "chatjobs_error"  # JobError.to_dict() as JSON, of a failed or cancelled job
ATTEMPT = "chatjobs_attempt"  # attempts so far
CANCEL = "chatjobs_cancel"  # 1 if a running job must stop
DEADLINE = "chatjobs_deadline"  # end of its time to live, in ms of the clock of Redis
TTL = "chatjobs_ttl"  # ms to DEADLINE when that was written
DELAY = "chatjobs_delay"  # ms to the time for which a job was scheduled, when that was written
TENANT = "chatjobs_tenant"  # job.tenant of the request
FAILURES = "chatjobs_failures"  # the failed attempts, see jobs.results.failures
ROW = "chatjobs_row"  # attempt of which the job's last row is
LOST = "chatjobs_lost"  # workers that died while they ran it
LOST_AT = "chatjobs_lost_at"  # seconds since the epoch: the last of these deaths
GROUP = "chatjobs_group"  # group of suspects that it is run with
LONGER = "chatjobs_longer"  # the context that it needs, and a worker that has it: longer.lua
MACHINE_ERRORS = "chatjobs_machine_errors"  # attempts that ended because of their worker's machine
RETRIED = "chatjobs_retried"  # retries used after errors

PEAK = "chatjobs_peak_memory_mb"  # of a result: `Usage.peak_memory_mb`

# Fields of a job's hash that clients read: those of each look at it, and the rest.
CHANGING_FIELDS = ("status", ATTEMPT, ERROR, ROW)
FURTHER_FIELDS = ("data", "origin", "created_at", "enqueued_at", "failure_ttl", FAILURES)

MAX_DATA = 64 * 2**20  # bytes of a job's data, decompressed
MAX_DEPTH = 100  # levels of nested JSON, well below the recursion limit of Python's json

QUEUES_KEY = Queue.redis_queues_keys  # set of all queue keys
NO_TIMEOUT = -1  # RQ's value for a job without a time limit
End = Literal["finished", "failed", "canceled"]  # RQ's status of a job that has ended
_REGISTRIES: dict[End, type[BaseRegistry]] = {
    "finished": FinishedJobRegistry,
    "failed": FailedJobRegistry,
    "canceled": CanceledJobRegistry,
}

_RESULT_TYPES: dict[End, Result.Type] = {
    "finished": Result.Type.SUCCESSFUL,
    "failed": Result.Type.FAILED,
    "canceled": Result.Type.STOPPED,
}

StatusName = Literal[
    "deferred", "scheduled", "queued", "started", "finished", "failed", "cancelled", "unknown"
]

_STATUSES: dict[bytes, StatusName] = {
    b"created": "queued",
    b"queued": "queued",
    b"deferred": "deferred",
    b"scheduled": "scheduled",
    b"started": "started",
    b"finished": "finished",
    b"failed": "failed",
    b"stopped": "cancelled",
    b"canceled": "cancelled",
}


def job_key(job_id: str) -> str:
    """Hash of a job."""
    return Job.key_for(job_id)


def queue_key(queue: str) -> str:
    """List of the job ids in a queue."""
    return Queue.redis_queue_namespace_prefix + queue


def queue_names(redis: Redis) -> list[str]:
    """Names of all queues in Redis, sorted."""
    return queues_of(redis.smembers(QUEUES_KEY))


def queues_of(members: Any) -> list[str]:
    """Names of the queues in the set of all queues, sorted."""
    names = [key.decode(errors="replace") for key in members]
    return sorted(name[len(queue_key("")) :] for name in names if name.startswith(queue_key("")))


def wip_key(queue: str) -> str:
    """Sorted set of the started jobs of a queue, members `<job>:<execution>`."""
    return StartedJobRegistry.key_template.format(queue)


def scheduled_key(queue: str) -> str:
    """Sorted set of the jobs of a queue that wait for their time, by seconds since the epoch."""
    return ScheduledJobRegistry.key_template.format(queue)


def deferred_key(queue: str) -> str:
    """Sorted set of the jobs of a queue that wait for other jobs."""
    return DeferredJobRegistry.key_template.format(queue)


def registry_key(queue: str, end: End) -> str:
    """Sorted set of the jobs of a queue that ended this way."""
    return _REGISTRIES[end].key_template.format(queue)


def results_key(job_id: str) -> str:
    """Stream of the results of a job."""
    return f"rq:results:{job_id}"


def executions_key(job_id: str) -> str:
    """Sorted set of the executions of a job."""
    return f"rq:executions:{job_id}"


def execution_key(job_id: str, execution: str) -> str:
    """Hash of an execution."""
    return f"rq:execution:{job_id}:{execution}"


def format_time(moment: datetime | None = None) -> str:
    """`moment` in RQ's time format; by default the time now."""
    return utcformat(moment or now())


def parse_time(value: bytes | None) -> float | None:
    """Seconds since the epoch from RQ's time format; None if `value` is not in this format."""
    try:
        moment = datetime.fromisoformat((value or b"").decode())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def integer(value: bytes | None, default: int) -> int:
    """A time to live in seconds, or a count; the default for a value that Redis would refuse."""
    try:
        number = default if value is None else int(value)
    except ValueError:
        return default
    return number if -1 <= number < 2**31 else default


def read_status(value: bytes | None) -> StatusName:
    """The client's status for RQ's status; "unknown" if it is absent or not one of RQ's."""
    return _STATUSES.get(value or b"", "unknown")


def queued_fields(
    *, now: str, queue: str, description: str, result_ttl: int, failure_ttl: int
) -> dict[str, str | int]:
    """Fields of the hash of a job that is enqueued at `now`, beside DATA and the status, which the
    script of its transition writes. RQ's time limit is off."""
    return {
        "created_at": now,
        "enqueued_at": now,
        "origin": queue,
        "description": description,
        "timeout": NO_TIMEOUT,
        "result_ttl": result_ttl,
        "failure_ttl": failure_ttl,
    }


def encode_call(func: str, name: str, value: str) -> tuple[bytes, bytes]:
    """JSON of a call with one keyword argument, whose `value` is JSON, and the field DATA of a job
    that runs it."""
    call = f'["{func}",null,[],{{"{name}":{value}}}]'.encode()
    if len(call) <= UNCOMPRESSED:
        return call, call  # RQ reads both
    return call, zlib.compress(call, COMPRESSION)


class Call(NamedTuple):
    """The call in a job's data. `size`: bytes of its JSON."""

    func: str | None
    args: Sequence[Any]
    kwargs: dict[str, Any]
    size: int


def decode_call(data: bytes) -> Call:
    """The call in the field `data` of a job's hash.

    Raises ValueError unless it is a call in JSON within a job's limits. Nothing is unpickled.
    """
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(data, MAX_DATA)
        rest = unpack.unconsumed_tail
    except zlib.error:  # RQ reads uncompressed data as well
        text, rest = data[:MAX_DATA], data[MAX_DATA:]
    if rest:
        raise ValueError(f"it is larger than {MAX_DATA / 1e6:.1f} MB, the limit of a job")
    try:
        call = from_json(text.decode())
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(call, list) or len(call) != 4:
        raise ValueError("it is not a list of four elements")
    if _deeper_than(call, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    func, instance, args, kwargs = call
    if instance is not None or not isinstance(args, list) or not isinstance(kwargs, dict):
        raise ValueError("it is not a call of a plain function")
    return Call(func if isinstance(func, str) else None, args, kwargs, len(text))


def request_of(kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The keyword argument `request` of a job's call; None unless it is a JSON object."""
    request = kwargs.get("request")
    return request if isinstance(request, dict) else None


def submitted_call(data: bytes) -> tuple[str | None, dict[str, Any]]:
    """Function and request in a job's data, for readers that do not run it: the row of a cancelled
    job keeps also a request that a worker would refuse. {} if there is none of MAX_DATA. Never
    raises."""
    with suppress(zlib.error):  # RQ reads uncompressed data as well
        data = zlib.decompressobj().decompress(data, MAX_DATA)
    try:
        func, _, _, kwargs = json.loads(data)
        return func if isinstance(func, str) else None, request_of(kwargs) or {}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None, {}


def result_fields(
    job_id: str,
    end: End,
    *,
    answer: str | None = None,
    peak_memory_mb: int | None = None,
    error: str | None = None,
    worker: str = "",
    execution: str | None = None,
) -> list[Any]:
    """Field, value, … of the entry in the results stream for a job that ended. `answer`: JSON."""
    result = Result(
        job_id,
        _RESULT_TYPES[end],
        connection=None,  # type: ignore[arg-type]
        return_value=answer,
        exc_string=error,
        worker_name=worker,
        serializer=JSONText,
        execution_id=execution,
    )
    own = {} if peak_memory_mb is None else {PEAK: peak_memory_mb}  # RQ ignores it
    return list(chain.from_iterable({**result.serialize(), **own}.items()))


def read_result(job_id: str, entry_id: bytes, fields: dict[bytes, bytes]) -> tuple[Any, str | None]:
    """Return value and failure text of an entry of the results stream."""
    result = Result.restore(
        job_id,
        entry_id.decode(),
        fields,
        connection=None,  # type: ignore[arg-type]
        serializer=JSONText,
    )
    return result.return_value, result.exc_string


def read_peak(fields: Mapping[bytes, bytes]) -> int | None:
    """The `peak_memory_mb` of an entry of the results stream; None from an older worker."""
    text = fields.get(PEAK.encode(), b"")
    return int(text) if text.isdigit() and len(text) < 10 else None


def is_abandoned(failure: str) -> bool:
    """True if RQ's clean-up failed the job because its worker died. `failure`: failure text."""
    return AbandonedJobError.__name__ in failure


def _deeper_than(value: Any, limit: int) -> bool:
    """True if lists and objects are nested deeper than `limit` levels. Not recursive."""
    level = [value]
    for _ in range(limit):
        children: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                children.extend(container.values())
            elif isinstance(container, list):
                children.extend(container)
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True
