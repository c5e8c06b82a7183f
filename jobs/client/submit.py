"""Requests into RQ jobs, jobs into their queues: the producer's contact with RQ.

A job of ours is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's timeouts
are off: time limits are the worker's business.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from redis import Redis
from rq import Queue
from rq.job import Job as RQJob
from rq.job import JobStatus
from rq.serializers import JSONSerializer
from rq.utils import now

from jobs import keys
from jobs.api.request import ChatRequest
from jobs.errors import InvalidRequest, JobError, invalid

RESULT_SECONDS = 86_400  # how long an answer that somebody waits for stays in Redis
BULK_RESULT_SECONDS = 3_600  # bulk answers are rows in Parquet by then
FAILURE_SECONDS = 7 * 86_400
NO_TIMEOUT = -1
CHUNK = 500  # jobs in one round trip

# KEYS: job, queue, queues, log, results. ARGV: id, created_at, data, then the job hash.
# Answers 1 if the job is enqueued, 0 if its id is taken. A script that the client library sends
# again, because a connection broke before the answer, finds its own job and changes nothing.
ENQUEUE = """
if redis.call('EXISTS', KEYS[1]) == 1 then
  local there = redis.call('HMGET', KEYS[1], 'created_at', 'data')
  return (there[1] == ARGV[2] and there[2] == ARGV[3]) and 1 or 0
end
redis.call('DEL', KEYS[4], KEYS[5])
redis.call('HSET', KEYS[1], unpack(ARGV, 4))
redis.call('SADD', KEYS[3], KEYS[2])
redis.call('RPUSH', KEYS[2], ARGV[1])
return 1
"""


def new_id() -> str:
    """A fresh job id of 32 hex digits; later ones sort after earlier ones."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


def parse_many(requests: Iterable[ChatRequest | dict[str, Any]]) -> list[ChatRequest]:
    """All requests, checked. Raises InvalidRequest, saying which one is at fault."""
    parsed = []
    for number, request in enumerate(requests):
        try:
            parsed.append(ChatRequest.parse(request))
        except InvalidRequest as error:
            raise invalid(f"request {number}: {error.message}", error.param) from None
    return parsed


def enqueue(redis: Redis, requests: Sequence[ChatRequest]) -> list[str]:
    """Put requests into their queues, in order; answers their job ids.

    Raises InvalidRequest if an id is taken: nothing is enqueued then. (If somebody takes one while
    this runs, the others are enqueued.)
    """
    jobs = [_rq_job(redis, request) for request in requests]
    hashes = [job.to_dict() for job in jobs]  # serialised before the first one goes out
    _check_free(redis, [request.job.id for request in requests if request.job.id is not None])
    script = redis.register_script(ENQUEUE)
    taken: list[str] = []
    for start in range(0, len(jobs), CHUNK):
        part = slice(start, start + CHUNK)
        pipeline = redis.pipeline(transaction=False)
        for job, fields in zip(jobs[part], hashes[part], strict=True):
            script(
                keys=[
                    job.key,
                    Queue.redis_queue_namespace_prefix + job.origin,
                    Queue.redis_queues_keys,
                    keys.log(job.id),
                    keys.results(job.id),
                ],
                args=[
                    job.id,
                    fields["created_at"],
                    fields["data"],
                    *(part for item in fields.items() for part in item),
                ],
                client=pipeline,
            )
        replies = pipeline.execute()
        taken += [job.id for job, reply in zip(jobs[part], replies, strict=True) if reply != 1]
    if taken:
        raise _id_taken(taken, "; nothing of it was changed, and the others are enqueued")
    return [job.id for job in jobs]


def _check_free(redis: Redis, ids: Sequence[str]) -> None:
    """Raises InvalidRequest if one of the ids is taken, or is there twice."""
    twice = sorted({job_id for job_id, count in Counter(ids).items() if count > 1})
    if twice:
        raise invalid(f"job.id: {twice[0]!r} is there twice; nothing was enqueued", "job.id")
    taken: list[str] = []
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        pipeline = redis.pipeline(transaction=False)
        for job_id in part:
            pipeline.exists(RQJob.key_for(job_id))
        taken += [job_id for job_id, there in zip(part, pipeline.execute(), strict=True) if there]
    if taken:
        raise _id_taken(taken, ": nothing was enqueued")


def _rq_job(redis: Redis, request: ChatRequest) -> RQJob:
    job_id = request.job.id or new_id()
    content = request.to_dict()
    content["job"]["id"] = job_id
    bulk = request.job.priority == "bulk"
    job = RQJob.create(
        keys.TASK,
        kwargs={"request": content},
        connection=redis,
        id=job_id,
        origin=keys.queue(request.model, request.job.priority),
        serializer=JSONSerializer,
        status=JobStatus.QUEUED,
        description=f"chat completion with {request.model[:100]}",  # RQ's own would be the prompt
        timeout=NO_TIMEOUT,
        result_ttl=BULK_RESULT_SECONDS if bulk else RESULT_SECONDS,
        failure_ttl=FAILURE_SECONDS,
    )
    job.enqueued_at = now()
    return job


def _id_taken(ids: list[str], and_now: str) -> JobError:
    more = f" (and {len(ids) - 1} more)" if len(ids) > 1 else ""
    return invalid(f"job.id: {ids[0]!r}{more} is taken by a job in Redis{and_now}", "job.id")
