"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.api.params import RequestFields
from jobs.api.request import ChatRequest
from jobs.client.limits import DEFAULTS
from jobs.client.refusals import (
    first_refusal,
    id_taken,
    queue_full,
    redis_full,
    row_taken,
    too_large,
)
from jobs.client.rq_format import (
    BULK_RESULT_SECONDS,
    DATA,
    FAILURE_SECONDS,
    MAX_DATA,
    QUEUES_KEY,
    RESULT_SECONDS,
    deferred_key,
    encode_call,
    job_key,
    queue_key,
    queued_fields,
    results_key,
    wip_key,
)
from jobs.client.turns import TURNS_LUA, refused
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.results.outbox import run_of

RequestInput: TypeAlias = ChatRequest | RequestFields | Mapping[str, Any]

BATCH = 500  # jobs per round trip
RESULT_TTLS = {"interactive": RESULT_SECONDS, "bulk": BULK_RESULT_SECONDS}
ROW_SECONDS = 7 * 86_400  # a row stays reserved this long after it was submitted, and after its end

ENQUEUE = lua.load("jobs.client", "rq_enqueue", TURNS_LUA)


# The names of the `unpack` lines of rq_enqueue.lua, in the same order.


class EnqueueKeys(NamedTuple):
    job: str
    queue: str
    wip: str
    quarantine: str
    other_queue: str
    other_wip: str
    other_quarantine: str
    queues: str
    log: str
    results: str
    open_bytes: str
    limits: str
    rows: str
    deadlines: str
    wake: str
    deferred: str


class EnqueueArgs(NamedTuple):
    job_id: str
    model: str
    data: bytes
    request_bytes: int
    message_bytes: int
    row: int | str
    digest: bytes
    row_seconds: int
    ttl: int | str
    max_jobs: int
    max_bytes: int
    max_request_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    session: str
    session_waits: int


def parse_many(requests: Iterable[RequestInput]) -> list[ChatRequest]:
    """All requests, checked. Raises InvalidRequest, naming the number of the bad one."""
    parsed = []
    for number, request in enumerate(requests):
        try:
            parsed.append(ChatRequest.parse(request))
        except InvalidRequest as error:
            raise invalid(f"request {number}: {error.message}", error.param) from None
    return parsed


def enqueue(redis: Redis, requests: Sequence[ChatRequest]) -> list[str]:
    """Put requests into their queues, in order. Returns their job ids.

    A request whose job is in Redis already, by its id or its row, gives that job. Raises JobError
    for the first request that is refused; the others are enqueued.
    """
    jobs = [_new_job(request) for request in requests]  # all, before the first one is sent
    _check_sizes(jobs)
    script = redis.register_script(ENQUEUE)
    refused: list[tuple[int, JobError]] = []
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        pipeline = redis.pipeline(transaction=False)
        for job in batch:
            script(keys=job.script_keys(), args=job.script_args(), client=pipeline)
        replies = pipeline.execute(raise_on_error=False)
        for number, (job, reply) in enumerate(zip(batch, replies, strict=True), start):
            error = _refusal(redis, job, reply)
            if error is not None:
                refused.append((number, error))
    if refused:
        raise first_refusal(refused, len(jobs))
    return [job.id for job in jobs]


class _NewJob(NamedTuple):
    id: str
    request: ChatRequest
    content: dict[str, Any]  # of the request
    call: bytes  # the job's data, before compression
    data: bytes
    digest: bytes  # of the content, of a request with a row

    def script_keys(self) -> EnqueueKeys:
        model, options = self.request.model, self.request.job
        other = "interactive" if options.priority == "bulk" else "bulk"
        queue, other_queue = keys.queue(model, options.priority), keys.queue(model, other)
        return EnqueueKeys(
            job=job_key(self.id),
            queue=queue_key(queue),
            wip=wip_key(queue),
            quarantine=keys.quarantine(queue),
            other_queue=queue_key(other_queue),
            other_wip=wip_key(other_queue),
            other_quarantine=keys.quarantine(other_queue),
            queues=QUEUES_KEY,
            log=keys.log(self.id),
            results=results_key(self.id),
            open_bytes=keys.OPEN_BYTES,
            limits=keys.LIMITS,
            rows=keys.rows(run_of(self.content), options.row or 0),
            deadlines=keys.DEADLINES,
            wake=keys.wake(model),
            deferred=deferred_key(queue),
        )

    def script_args(self) -> list[Any]:
        """The named arguments, then field, value, … of the hash."""
        model, options = self.request.model, self.request.job
        named = EnqueueArgs(
            job_id=self.id,
            model=model,
            data=self.data,
            request_bytes=len(self.call),
            message_bytes=_largest_message(self.content),
            row="" if options.row is None else options.row % keys.ROWS_PER_KEY,
            digest=self.digest,
            row_seconds=ROW_SECONDS,
            ttl="" if options.ttl is None else max(1, round(1000 * options.ttl)),
            max_jobs=DEFAULTS.jobs,
            max_bytes=DEFAULTS.bytes,
            max_request_bytes=DEFAULTS.request_bytes,
            max_message_bytes=DEFAULTS.message_bytes,
            max_session_bytes=DEFAULTS.session_bytes,
            session=options.session or "",
            session_waits=int(options.turn is not None and options.turn.wait),
        )
        fields = queued_fields(
            queue=keys.queue(model, options.priority),
            description=f"chat completion with {model[:100]}",  # RQ's own contains the prompt
            result_ttl=options.result_ttl or RESULT_TTLS[options.priority],
            failure_ttl=FAILURE_SECONDS,
        )
        return [*named, *chain.from_iterable(fields.items())]


def _new_job(request: ChatRequest) -> _NewJob:
    content = request.to_dict()
    digest = b""
    job_id = request.job.id
    if request.job.row is not None:
        digest = _digest(content)
        row = f"{run_of(content)}/{request.job.row}/".encode()
        job_id = job_id or hashlib.blake2b(row + digest, digest_size=16).hexdigest()
    content["job"]["id"] = job_id = job_id or _new_id()
    call, data = encode_call(keys.TASK, {"request": content})
    return _NewJob(job_id, request, content, call, data, digest)


def _new_id() -> str:
    """A job id of 32 hex digits that sorts by creation time."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def _digest(content: dict[str, Any]) -> bytes:
    """Eight bytes that tell requests with the same row apart."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).digest()


def _largest_message(content: dict[str, Any]) -> int:
    return max(len(json.dumps(message)) for message in content["messages"])


def _check_sizes(jobs: Sequence[_NewJob]) -> None:
    """Raises InvalidRequest for a request that no worker would read, whatever the limits."""
    for number, job in enumerate(jobs):
        if len(job.call) > MAX_DATA:
            error = too_large("request_bytes", len(job.call), MAX_DATA)
            which = f"request {number}: " if len(jobs) > 1 else ""
            raise invalid(f"{which}{error.message}; nothing was enqueued")


def _refusal(redis: Redis, job: _NewJob, reply: Any) -> JobError | None:
    """Why a request was refused, from the reply to its script. None: its job is in Redis."""
    if isinstance(reply, OutOfMemoryError):
        stored: Any = redis.hget(job_key(job.id), DATA)
        # The script may have run before Redis was full, and its reply was lost.
        return None if stored == job.data else redis_full(redis)
    if isinstance(reply, Exception):
        raise reply
    reason, *numbers = [value.decode() for value in reply]
    if reason == "busy" or reason.startswith("session"):
        return refused(job.request.job.session or "", job.request.model, reply)
    match reason:
        case "enqueued" | "same":
            return None
        case "id":
            return id_taken(job.id)
        case "row":
            return row_taken(run_of(job.content), job.request.job.row)
        case "jobs" | "bytes":
            return queue_full(job.request.model, reason, *map(int, numbers))
        case _:
            return too_large(reason, *map(int, numbers))
