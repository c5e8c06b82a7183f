"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys
from jobs.api.params import RequestFields
from jobs.api.request import ChatRequest
from jobs.client.enqueue_script import ENQUEUE, EnqueueArgs, EnqueueKeys
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
    format_time,
    job_key,
    queue_key,
    queued_fields,
    results_key,
    wip_key,
)
from jobs.client.turns import refused
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.results.outbox import run_of

RequestInput: TypeAlias = ChatRequest | RequestFields | Mapping[str, Any]

BATCH = 500  # jobs per round trip
RESULT_TTLS = {"interactive": RESULT_SECONDS, "bulk": BULK_RESULT_SECONDS}
ROW_SECONDS = 7 * 86_400  # a row stays reserved this long after it was submitted, and after its end

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def parse_many(requests: Iterable[RequestInput], first: int = 0) -> list[ChatRequest]:
    """All requests, checked. Raises InvalidRequest, naming the number of the bad one, counted from
    `first`."""
    parsed = []
    for number, request in enumerate(requests, first):
        try:
            parsed.append(ChatRequest.parse(request))
        except InvalidRequest as error:
            raise invalid(f"request {number}: {error.message}", error.param) from None
    return parsed


def windows(requests: Iterable[RequestInput]) -> Iterator[list[ChatRequest]]:
    """The requests, checked, in lists of BATCH. Raises InvalidRequest with the number of the bad
    one, and how many are in the lists before."""
    source, done = iter(requests), 0
    while window := list(islice(source, BATCH)):
        try:
            parsed = parse_many(window, done)
        except InvalidRequest as error:
            raise invalid(f"{error.message}; {done} requests are enqueued", error.param) from None
        yield parsed
        done += len(window)


def check_result_ttl(seconds: int) -> int:
    """`seconds`, if results can be kept for them. Raises InvalidRequest."""
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 < seconds < 2**31:
        raise invalid(f"result_ttl: a whole number of seconds from 1 on, got {seconds!r}")
    return seconds


def enqueue(
    redis: Redis, requests: Sequence[ChatRequest], result_ttl: int | None = None, first: int = 0
) -> list[str]:
    """Put requests into their queues, in order. Returns their job ids. `result_ttl`: of requests
    that have none. `first`: the number of the first one, which errors name.

    A request whose job is in Redis already, by its id or its row, gives that job. Raises JobError
    for the first request that is refused; the others are enqueued.
    """
    jobs = [_new_job(request) for request in requests]  # all, before the first one is sent
    _check_sizes(jobs)
    script = redis.register_script(ENQUEUE)
    refused: list[tuple[int, JobError]] = []
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        pipeline: Any = redis.pipeline(transaction=False)  # its stubs lack `scripts`
        pipeline.scripts.add(script)
        now = format_time()
        for job in batch:
            names, args = job.script_keys(), job.script_args(now, result_ttl)
            pipeline.execute_command("EVALSHA", script.sha, len(names), *names, *args)
        replies = pipeline.execute(raise_on_error=False)
        for number, (job, reply) in enumerate(zip(batch, replies, strict=True), start):
            error = _refusal(redis, job, reply)
            if error is not None:
                refused.append((number, error))
    if refused:
        raise first_refusal(refused, len(jobs), first)
    return [job.id for job in jobs]


class _NewJob(NamedTuple):
    id: str
    request: ChatRequest
    run: str
    request_bytes: int
    message_bytes: int
    data: bytes
    digest: bytes  # of the content, of a request with a row

    def script_keys(self) -> EnqueueKeys:
        options = self.request.job
        return _keys_of(self.request.model, options.priority)._replace(
            job=job_key(self.id),
            log=keys.log(self.id),
            results=results_key(self.id),
            rows=keys.rows(self.run, options.row or 0),
        )

    def script_args(self, now: str, result_ttl: int | None) -> list[Any]:
        """The named arguments, then field, value, … of the hash."""
        model, options = self.request.model, self.request.job
        named = EnqueueArgs(
            job_id=self.id,
            model=model,
            data=self.data,
            request_bytes=self.request_bytes,
            message_bytes=self.message_bytes,
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
        keep = options.result_ttl or result_ttl or RESULT_TTLS[options.priority]
        return [*named, *_hash_fields(model, options.priority, now, keep)]


@lru_cache(maxsize=64)
def _keys_of(model: str, priority: str) -> EnqueueKeys:
    """The keys of the queue; those of one job are empty."""
    other = "interactive" if priority == "bulk" else "bulk"
    queue, other_queue = keys.queue(model, priority), keys.queue(model, other)
    return EnqueueKeys(
        job="",
        queue=queue_key(queue),
        wip=wip_key(queue),
        quarantine=keys.quarantine(queue),
        other_queue=queue_key(other_queue),
        other_wip=wip_key(other_queue),
        other_quarantine=keys.quarantine(other_queue),
        queues=QUEUES_KEY,
        log="",
        results="",
        open_bytes=keys.OPEN_BYTES,
        limits=keys.LIMITS,
        rows="",
        deadlines=keys.DEADLINES,
        wake=keys.wake(model),
        deferred=deferred_key(queue),
    )


@lru_cache(maxsize=64)
def _hash_fields(model: str, priority: str, now: str, result_ttl: int) -> tuple[Any, ...]:
    """Field, value, … of the hash of a job that is queued now."""
    fields = queued_fields(
        now=now,
        queue=keys.queue(model, priority),
        description=f"chat completion with {model[:100]}",  # RQ's own contains the prompt
        result_ttl=result_ttl,
        failure_ttl=FAILURE_SECONDS,
    )
    return tuple(chain.from_iterable(fields.items()))


def _new_job(request: ChatRequest) -> _NewJob:
    content = request.to_dict()
    run, row, job_id = run_of(content), request.job.row, request.job.id
    # All of it becomes JSON once: the sizes and the digest come from the text of the job.
    messages = [_to_json(message) for message in content.pop("messages")]
    content["job"] = content.pop("job")  # last, so that the id can be appended
    content["job"].pop("id", None)
    text = f'{{"messages":[{",".join(messages)}],{_to_json(content)[1:]}'
    digest = b""
    if row is not None:
        digest = hashlib.blake2b((text + (job_id or "")).encode(), digest_size=8).digest()
        name = f"{run}/{row}/".encode() + digest
        job_id = job_id or hashlib.blake2b(name, digest_size=16).hexdigest()
    job_id = job_id or _new_id()
    comma = "," if content["job"] else ""
    text = f'{text[:-2]}{comma}"id":"{job_id}"}}}}'
    call, data = encode_call(keys.TASK, "request", text)
    return _NewJob(job_id, request, run, len(call), max(map(len, messages)), data, digest)


def _new_id() -> str:
    """A job id of 32 hex digits that sorts by creation time."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def _check_sizes(jobs: Sequence[_NewJob]) -> None:
    """Raises InvalidRequest for a request that no worker would read, whatever the limits."""
    for number, job in enumerate(jobs):
        if job.request_bytes > MAX_DATA:
            error = too_large("request_bytes", job.request_bytes, MAX_DATA)
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
            return row_taken(job.run, job.request.job.row)
        case "jobs" | "bytes":
            return queue_full(job.request.model, reason, *map(int, numbers))
        case _:
            return too_large(reason, *map(int, numbers))
