"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from redis import Redis

from jobs import keys, lua
from jobs.api.params import RequestFields
from jobs.api.request import ChatRequest
from jobs.client.rq_format import (
    BULK_RESULT_SECONDS,
    FAILURE_SECONDS,
    MAX_DATA,
    QUEUES_KEY,
    RESULT_SECONDS,
    data_size,
    job_key,
    queue_key,
    queued_job,
    results_key,
)
from jobs.errors import InvalidRequest, JobError, invalid

RequestInput: TypeAlias = ChatRequest | RequestFields | Mapping[str, Any]

BATCH = 500  # jobs per round trip

ENQUEUE = lua.load("jobs.client", "rq_enqueue")


# The names of the `unpack` lines of rq_enqueue.lua, in the same order.


class EnqueueKeys(NamedTuple):
    job: str
    queue: str
    queues: str
    log: str
    results: str
    wake: str


class EnqueueArgs(NamedTuple):
    job_id: str
    created_at: str
    data: bytes


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

    Raises InvalidRequest if an id is taken: nothing is enqueued then. (If another client takes one
    while this runs, the other requests are enqueued.)
    """
    # All are serialised before the first one is sent.
    jobs = [_new_job(redis, request) for request in requests]
    _check_sizes(jobs)
    _check_ids(redis, [request.job.id for request in requests if request.job.id is not None])
    script = redis.register_script(ENQUEUE)
    taken: list[str] = []
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        pipeline = redis.pipeline(transaction=False)
        for job in batch:
            script(keys=job.script_keys(), args=job.script_args(), client=pipeline)
        replies = pipeline.execute()
        taken += [job.id for job, reply in zip(batch, replies, strict=True) if reply != 1]
    if taken:
        raise _id_taken(taken, "; that job is unchanged, and all other requests are enqueued")
    return [job.id for job in jobs]


class _NewJob(NamedTuple):
    id: str
    queue: str
    fields: dict[str, Any]  # of the job's hash

    def script_keys(self) -> EnqueueKeys:
        return EnqueueKeys(
            job=job_key(self.id),
            queue=queue_key(self.queue),
            queues=QUEUES_KEY,
            log=keys.log(self.id),
            results=results_key(self.id),
            wake=keys.wake(keys.model_of(self.queue)),
        )

    def script_args(self) -> list[Any]:
        """The named arguments, then field, value, … of the hash."""
        named = EnqueueArgs(
            job_id=self.id, created_at=self.fields["created_at"], data=self.fields["data"]
        )
        return [*named, *chain.from_iterable(self.fields.items())]


def _new_job(redis: Redis, request: ChatRequest) -> _NewJob:
    job_id = request.job.id or _new_id()
    content = request.to_dict()
    content["job"]["id"] = job_id
    queue = keys.queue(request.model, request.job.priority)
    fields = queued_job(
        redis,
        job_id,
        keys.TASK,
        {"request": content},
        queue=queue,
        description=f"chat completion with {request.model[:100]}",  # RQ's own contains the prompt
        result_ttl=BULK_RESULT_SECONDS if request.job.priority == "bulk" else RESULT_SECONDS,
        failure_ttl=FAILURE_SECONDS,
    )
    return _NewJob(job_id, queue, fields)


def _new_id() -> str:
    """A job id of 32 hex digits that sorts by creation time."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def _check_sizes(jobs: Sequence[_NewJob]) -> None:
    """Raises InvalidRequest for a request that no worker would read."""
    for number, job in enumerate(jobs):
        size = data_size(job.fields)
        if size > MAX_DATA:
            which = f"request {number}" if len(jobs) > 1 else "the request"
            raise invalid(
                f"{which} has {size / 1e6:.1f} MB as JSON, and a job holds at most "
                f"{MAX_DATA / 1e6:.1f} MB: shorten it; nothing was enqueued"
            )


def _check_ids(redis: Redis, ids: Sequence[str]) -> None:
    """Raises InvalidRequest if an id is taken or given twice."""
    twice = sorted({job_id for job_id, count in Counter(ids).items() if count > 1})
    if twice:
        raise invalid(f"job.id: {twice[0]!r} is given twice; nothing was enqueued", "job.id")
    taken: list[str] = []
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        pipeline = redis.pipeline(transaction=False)
        for job_id in batch:
            pipeline.exists(job_key(job_id))
        replies = pipeline.execute()
        taken += [job_id for job_id, exists in zip(batch, replies, strict=True) if exists]
    if taken:
        raise _id_taken(taken, "; nothing was enqueued")


def _id_taken(ids: list[str], consequence: str) -> JobError:
    more = f" (and {len(ids) - 1} more)" if len(ids) > 1 else ""
    return invalid(f"job.id: {ids[0]!r}{more} is taken by a job in Redis{consequence}", "job.id")
