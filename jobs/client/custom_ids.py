"""Rows that `custom_id` identifies: a request of a run keeps its row wherever it is in a file.

`chatjobs submit` calls this before it enqueues: `find_taken` names the requests that would be
refused, and `assign_rows` gives the others their rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.api.request import ChatRequest
from jobs.client.new_job import DIGEST_BYTES, ROW_SECONDS, NewJob, new_job
from jobs.client.refusals import custom_id_taken, id_taken, redis_full, row_taken
from jobs.client.rq_format import DATA, ROWS_LUA, TENANTS_LUA, job_key
from jobs.encoding import to_json
from jobs.errors import JobError

ASSIGN = lua.load("jobs.client", "assign_row", TENANTS_LUA, ROWS_LUA)

# What to do if the number of a line without custom_id is taken. A custom_id is no remedy in a run
# whose rows were submitted without.
OTHER_RUN = (
    "submit these lines with another --run; in a new run, lines with a custom_id keep their rows "
    "when the file changes"
)

# KEYS and ARGV of assign_row.lua, by name and in order.


class AssignKeys(NamedTuple):
    ids: str
    next_row: str


class AssignArgs(NamedTuple):
    custom_id: bytes
    run: str
    row: int
    digest: bytes
    seconds: int


def content_id(request: ChatRequest) -> str:
    """A job id of the whole content of a request."""
    return hashlib.blake2b(to_json(request.to_dict()).encode(), digest_size=16).hexdigest()


def is_keyed(request: ChatRequest) -> bool:
    """Whether custom_id identifies the row of a request; its `job.row` is then a proposal."""
    options = request.job
    return options.run is not None and options.row is not None and options.custom_id is not None


def assign_rows(redis: Redis, requests: Sequence[ChatRequest]) -> None:
    """Set `job.row` of the requests, all of which `is_keyed`. Raises JobError if Redis is full, and
    redis.RedisError."""
    script = redis.register_script(ASSIGN)
    pipeline: Any = redis.pipeline(transaction=False)  # its stubs lack `scripts`
    pipeline.scripts.add(script)
    for request in requests:
        job = new_job(request)
        names = AssignKeys(_ids_of(request), keys.next_row(job.run))
        args = AssignArgs(
            custom_id=_digest(request),
            run=job.run,
            row=request.job.row or 0,
            digest=job.digest,
            seconds=ROW_SECONDS,
        )
        pipeline.execute_command("EVALSHA", script.sha, len(names), *names, *args)
    try:
        rows = pipeline.execute()
    except OutOfMemoryError:
        raise redis_full(redis) from None
    for request, row in zip(requests, rows, strict=True):
        request.job.row = row


def find_taken(redis: Redis, requests: Sequence[ChatRequest]) -> list[JobError | None]:
    """For each request, why it would be refused now: another one has its id, row or custom_id.
    Changes nothing. Raises redis.RedisError."""
    jobs = [
        new_job(_with_row(request, row))
        for request, row in zip(requests, _rows(redis, requests), strict=True)
    ]
    pipeline: Any = redis.pipeline(transaction=False)
    for job in jobs:
        row = job.request.job.row or 0
        pipeline.hget(keys.rows(job.run, row), row % keys.ROWS_PER_KEY)
        pipeline.hget(job_key(job.id), DATA if job.request.job.id else "")
    replies = pipeline.execute()
    reservations = [
        reservation if _is_other(job, reservation) else b""
        for job, reservation in zip(jobs, replies[::2], strict=True)
    ]
    for job, reservation in zip(jobs, reservations, strict=True):
        pipeline.exists(job_key(job.job_of(reservation)))
    return [
        _refusal(job, data, reservation, is_there=bool(is_there))
        for job, data, reservation, is_there in zip(
            jobs, replies[1::2], reservations, pipeline.execute(), strict=True
        )
    ]


def _rows(redis: Redis, requests: Sequence[ChatRequest]) -> list[int | None]:
    """The row that each request has by its custom_id, or has proposed. None: it gets a free one."""
    pipeline: Any = redis.pipeline(transaction=False)
    for request in requests:
        pipeline.hget(_ids_of(request), _digest(request))
        pipeline.exists(keys.next_row(request.job.run or ""))
    replies = pipeline.execute()
    rows: list[int | None] = []
    for request, known, has_next in zip(requests, replies[::2], replies[1::2], strict=True):
        if not is_keyed(request):
            rows.append(request.job.row)
        elif known is not None and known.isdigit():
            rows.append(int(known))
        else:
            rows.append(None if has_next else request.job.row)
    return rows


def _is_other(job: NewJob, reservation: bytes | None) -> bool:
    """Whether another request has reserved the job's row."""
    if job.request.job.row is None or not reservation:
        return False
    return reservation[:DIGEST_BYTES] != job.digest


def _refusal(
    job: NewJob, data: bytes | None, reservation: bytes, *, is_there: bool
) -> JobError | None:
    """`data` of the job that has its id, `reservation` of its row by another request, and whether
    the job of that is in Redis: without it, the row is taken over, as in rq_enqueue.lua."""
    options = job.request.job
    if data is not None and data != job.data:
        return id_taken(job.id)
    is_open = len(reservation) > DIGEST_BYTES
    if not reservation or (is_open and not is_there):
        return None
    if options.custom_id is not None:
        return custom_id_taken(job.run, options.custom_id, options.row)
    return row_taken(job.run, options.row, OTHER_RUN)


def _with_row(request: ChatRequest, row: int | None) -> ChatRequest:
    return request.model_copy(update={"job": request.job.model_copy(update={"row": row})})


def _ids_of(request: ChatRequest) -> str:
    return keys.custom_ids(request.job.run or "", request.job.custom_id or "")


def _digest(request: ChatRequest) -> bytes:
    name = (request.job.custom_id or "").encode()
    return hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
