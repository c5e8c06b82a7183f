"""A fake worker that writes to Redis what the real one writes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import redis

from jobs import Client, JobError, keys
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.client.rq_format import ATTEMPT, ERROR, job_key, queue_key, result_fields, results_key
from jobs.stream.entries import END_LUA, Entry, StreamWriter, end_id, end_payload, piece

# KEYS: job, results, log, live. ARGV: status, error, end id, end payload, the result's fields.
SETTLE = (
    END_LUA
    + f"""
redis.call('HSET', KEYS[1], 'status', ARGV[1])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], '{ERROR}', ARGV[2]) end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 5))
end_stream(KEYS[3], KEYS[4], ARGV[3], ARGV[4])
"""
)


def completion_of(job_id: str, *texts: str) -> ChatCompletion:
    return ChatCompletion(
        id=f"chatcmpl-{job_id}",
        created=1,
        model="demo",
        choices=[
            Choice(index=i, message=AssistantMessage(content=text), finish_reason="stop")
            for i, text in enumerate(texts)
        ],
        usage=Usage(prompt_tokens=3, completion_tokens=len(texts), total_tokens=3 + len(texts)),
    )


class FakeWorker:
    """Runs jobs step by step: one method per change that a worker makes in Redis."""

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url)
        self.writer = StreamWriter(self.redis)

    def start(self, job_id: str) -> int:
        """Claim the job. Returns the number of the attempt."""
        key = job_key(job_id)
        origin = self.redis.hget(key, "origin").decode()
        self.redis.lrem(queue_key(origin), 0, job_id)
        self.redis.hset(key, "status", "started")
        return self.redis.hincrby(key, ATTEMPT, 1)

    def requeue(self, job_id: str) -> None:
        key = job_key(job_id)
        self.redis.hset(key, "status", "queued")
        self.redis.lpush(queue_key(self.redis.hget(key, "origin").decode()), job_id)

    def write(self, job_id: str, attempt: int, seq: int, text: str, **more) -> bool:
        payload = {"p": [piece(0, text, **more)]}
        return self.writer.write_many([Entry(job_id, attempt, seq, payload)])[0]

    def finish(self, job_id: str, *texts: str, attempt: int = 1) -> None:
        value = completion_of(job_id, *texts)
        payload = end_payload("stop", value.usage.to_dict())
        result = result_fields(job_id, "finished", answer=value.to_dict())
        self._settle(job_id, attempt, "finished", "", payload, result)

    def fail(self, job_id: str, error: JobError, attempt: int = 1, status: str = "failed") -> None:
        payload = end_payload("error", error=error)
        result = result_fields(job_id, "failed", error=str(error))
        self._settle(job_id, attempt, status, json.dumps(error.to_dict()), payload, result)

    def _settle(self, job_id, attempt, status, error, payload, result) -> None:
        names = [job_key(job_id), results_key(job_id), keys.log(job_id), keys.live(job_id)]
        values = [status, error, end_id(attempt), payload, *result]
        self.redis.eval(SETTLE, len(names), *names, *values)


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


@pytest.fixture
def worker(redis_url: str) -> Iterator[FakeWorker]:
    worker = FakeWorker(redis_url)
    yield worker
    worker.redis.close()
