"""Jobs of these tests are run step by step, on a real Redis server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from jobs import Client, JobError, keys
from jobs.api.answer import AssistantMessage, ChatCompletion, Choice, Usage
from jobs.store.claimed_job import ClaimedJob
from jobs.store.connection.connect import connect
from jobs.store.stream import StreamWriter
from jobs.stream.delta import Delta
from jobs.stream.entries import Entry
from jobs.testing.attempts import Attempts


def completion_of(job_id: str, *texts: str, reasoning: str | None = None) -> ChatCompletion:
    return ChatCompletion(
        id=f"chatcmpl-{job_id}",
        created=1,
        model="demo",
        choices=[
            Choice(
                index=i,
                message=AssistantMessage(content=text, reasoning_content=reasoning),
                finish_reason="stop",
            )
            for i, text in enumerate(texts)
        ],
        usage=Usage(prompt_tokens=3, completion_tokens=len(texts), total_tokens=3 + len(texts)),
    )


class StepwiseWorker:
    """One method per change that a worker makes in Redis; attempts by their numbers. Rows leave the
    outbox at once."""

    def __init__(self, url: str) -> None:
        self.redis = connect(url)
        self.attempts = Attempts(self.redis)
        self.writer = StreamWriter(self.redis)
        self._started: dict[tuple[str, int], ClaimedJob] = {}

    def start(self, job_id: str) -> int:
        """Claim the job, whichever wait before it. Returns the number of the attempt."""
        store, others = self.attempts.store, []
        found: ClaimedJob | None = None
        while found is None:
            claimed = store.claim(lambda *_: 1).jobs
            assert claimed, f"job {job_id} does not wait"
            found = next((job for job in claimed if job.lease.job == job_id), None)
            others += [job.lease for job in claimed if job is not found]
        store.leases.give_back(others, undo_attempt=True)
        self._started[job_id, found.lease.attempt] = found
        return found.lease.attempt

    def requeue(self, job_id: str) -> None:
        """Return the job, which runs, to its queue."""
        newest = max(number for name, number in self._started if name == job_id)
        self.attempts.store.leases.give_back([self._started[job_id, newest].lease])

    def write(self, job_id: str, attempt: int, seq: int, text: str, **more) -> bool:
        entry = Entry(job_id, attempt, seq, (Delta(0, text, **more),))
        return self.writer.write_many([entry])[0]

    def finish(
        self, job_id: str, *texts: str, attempt: int = 1, reasoning: str | None = None
    ) -> None:
        self.complete(job_id, completion_of(job_id, *texts, reasoning=reasoning), attempt)

    def complete(self, job_id: str, completion: ChatCompletion, attempt: int = 1) -> None:
        self.attempts.finish(self._started[job_id, attempt], completion)
        self.attempts.take_rows()

    def fail(self, job_id: str, error: JobError, attempt: int = 1) -> None:
        self.attempts.fail(self._started[job_id, attempt], error)
        self.attempts.take_rows()


STATUS = {
    "name": "w1",
    "host": "h",
    "device": "cpu",
    "paused": "",
    "models": [],
    "names": [],
    "memory": {"weights": 1, "cache": 1},
    "running": 0,
    "tokens_per_second": 0.0,
}


def publish_worker(client: Client, *models: str) -> None:
    """Publish the status of a worker, and the name of a dead one."""
    client.redis.zadd(keys.WORKERS, {"w1": 2, "dead": 1})
    client.redis.set(keys.worker("w1"), json.dumps({**STATUS, "names": models}))


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url) as client:
        yield client


@pytest.fixture
def worker(redis_url: str) -> Iterator[StepwiseWorker]:
    worker = StepwiseWorker(redis_url)
    yield worker
    worker.redis.close()
