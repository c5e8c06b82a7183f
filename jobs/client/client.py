"""What producers use: a `Client` puts requests into queues, a `Job` is the handle to one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from redis import Redis, RedisError

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.client.cancel import cancel_steps
from jobs.client.connection import connect, redis_failure
from jobs.client.follow import follow
from jobs.client.state import Status, look, unknown
from jobs.client.steps import Emit, Steps, answer
from jobs.client.submit import enqueue, parse_many
from jobs.client.wait import result_steps
from jobs.errors import invalid
from jobs.keys import JOB_ID


class Client:
    """Submits chat-completion jobs and finds them again. Threads may share one.

    `url` is redis://, rediss:// or unix://; by default $CHATJOBS_REDIS_URL, then the local server.
    It connects with the first call; a Redis that can't be reached is a JobError (internal).
    """

    def __init__(self, url: str | None = None) -> None:
        self.redis = connect(url)

    def submit(self, request: ChatRequest | dict[str, Any]) -> Job:
        """Enqueue one request. When this returns, the job is in Redis.

        Raises InvalidRequest, naming the field, before anything is enqueued; also for a
        `job.id` that is taken.
        """
        parsed = ChatRequest.parse(request)
        return Job(self.redis, self._enqueue([parsed])[0], parsed)

    def submit_many(self, requests: Iterable[ChatRequest | dict[str, Any]]) -> list[Job]:
        """Enqueue many requests in few round trips; all are checked before any is enqueued."""
        parsed = parse_many(requests)
        ids = self._enqueue(parsed)
        return [Job(self.redis, *pair) for pair in zip(ids, parsed, strict=True)]

    def job(self, job_id: str) -> Job:
        """The handle to a job by its id, wherever it was submitted. Asks Redis nothing."""
        return Job(self.redis, job_id)

    def close(self) -> None:
        self.redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _enqueue(self, requests: list[ChatRequest]) -> list[str]:
        try:
            return enqueue(self.redis, requests)
        except RedisError as error:
            raise redis_failure(self.redis, error) from error


class Job:
    """One submitted request: an id and a connection. All methods raise JobError."""

    def __init__(self, redis: Redis, job_id: str, request: ChatRequest | None = None) -> None:
        self.id = check_id(job_id)
        self._redis = redis
        self._request = request

    def stream(self, after: str | None = None) -> Iterator[ChatChunk]:
        """The answer as it is generated: replayed from the start, then live, to the end.

        `after` is the `cursor` of a chunk, to go on behind it. A chunk with `reset` says that the
        job was started again: forget what came before. Any number of readers may follow a job;
        one that publishes nothing gives its whole answer at the end.
        """
        return follow(self._redis, self.id, after)

    def result(self, timeout: float | None = None) -> ChatCompletion:
        """Wait for the whole answer, at most `timeout` seconds (JobError `timeout`)."""
        return answer(result_steps(self.id, timeout), self._redis)

    def status(self) -> Status:
        """Where the job is now."""
        return answer(status_steps(self.id), self._redis)

    def cancel(self) -> bool:
        """Stop the job. False if it was over already; one that runs stops soon, not at once."""
        return answer(cancel_steps(self.id), self._redis)

    @property
    def request(self) -> ChatRequest:
        """The request as it was submitted."""
        if self._request is None:
            self._request = answer(request_steps(self.id), self._redis)
        return self._request

    def __repr__(self) -> str:
        return f"Job({self.id!r})"


def check_id(job_id: str) -> str:
    """`job_id`, if it can be one. Raises InvalidRequest."""
    if not isinstance(job_id, str) or not JOB_ID.fullmatch(job_id):
        raise invalid(f"a job id has letters, digits, '_' and '-' only, got {job_id!r}", "id")
    return job_id


def status_steps(job_id: str) -> Steps[Status]:
    state = yield from look(job_id)
    yield Emit(state.status)


def request_steps(job_id: str) -> Steps[ChatRequest]:
    state = yield from look(job_id, full=True)
    if not state.request:
        raise unknown(job_id)
    yield Emit(ChatRequest.parse(state.request))
