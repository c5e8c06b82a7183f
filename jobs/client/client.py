"""The blocking API: a `Client` submits requests and returns the handles to their jobs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

from redis import Redis, RedisError

from jobs.api.params import SessionFields
from jobs.client.chat_completions import Chat
from jobs.client.job import Job, Q, R, ScoreJob, kept_requests
from jobs.client.run import Run
from jobs.client.serving import ServingCheck, refused_templates
from jobs.client.session import Session
from jobs.client.wait_many import follow_ends, gather_outcomes, jobs_in, wait_for_rows
from jobs.errors import JobError
from jobs.operations import Request, operation_for, parse_request
from jobs.store.connection.connect import connect, connect_async, redis_failure
from jobs.store.connection.protocol import iterate_sync, run_sync
from jobs.store.connection.sync_driver import SyncConnection
from jobs.store.durable import DurableSubmit
from jobs.store.enqueue import (
    ChatInput,
    Enqueued,
    RequestInput,
    ScoreInput,
    check_result_ttl,
    enqueue,
    parse_many,
    windows,
)
from jobs.store.enqueue_errors import first_refusal
from jobs.store.eviction import EvictionCheck
from jobs.store.sessions import needed_model, open_session


class Client:
    """Submits chat and scoring jobs and finds them again. May be shared by threads.

    `url` is redis://, rediss:// or unix://; by default $CHATJOBS_REDIS_URL, else the local server.
    Connects on the first call; if Redis can't be reached, that call raises JobError (unavailable).
    `result_ttl`: seconds that Redis keeps the results of its jobs, unless a request has a
    `job.result_ttl`; by default a day, and an hour for bulk jobs.
    """

    def __init__(self, url: str | None = None, *, result_ttl: int | None = None) -> None:
        self._result_ttl = None if result_ttl is None else check_result_ttl(result_ttl)
        self.connection = SyncConnection(connect(url), partial(connect_async, url))
        self._eviction = EvictionCheck()
        self.serving: ServingCheck | None = ServingCheck(self.redis)

    @cached_property
    def chat(self) -> Chat:
        """`client.chat.completions.create(...)`, as in the openai package."""
        return Chat(self.submit, self.connection)

    @property
    def redis(self) -> Redis:
        """The client of the package redis."""
        redis: Redis = self.connection.redis
        return redis

    @overload
    def submit(self, request: ScoreInput, *, durable: bool = False) -> ScoreJob: ...
    @overload
    def submit(self, request: ChatInput, *, durable: bool = False) -> Job: ...
    def submit(self, request: RequestInput, *, durable: bool = False) -> Job[Any, Any]:
        """Enqueue one request. When this returns, the job is in Redis; with `durable`, it is on the
        disk of Redis and on its replicas, which takes some seconds. Warns (NobodyServes) if no
        running worker serves its model.

        Raises InvalidRequest, naming the field, for a bad request or a `job.id` that is taken.
        """
        parsed = parse_request(request)
        with self._waiting_until(durable) as enqueued:
            enqueued += self._submit_all([parsed], [parsed])
            return enqueued[0]

    @overload
    def submit_many(
        self, requests: Iterable[ScoreInput], *, durable: bool = False
    ) -> list[ScoreJob]: ...
    @overload
    def submit_many(self, requests: Iterable[ChatInput], *, durable: bool = False) -> list[Job]: ...
    def submit_many(self, requests: Iterable[RequestInput], *, durable: bool = False) -> list[Any]:
        """Enqueue many requests in few round trips. `durable`: see `submit`; they wait together.

        All requests of a list are checked before any is enqueued. An iterator is read in windows
        of BATCH requests, of which none is kept: an error says how many are enqueued.
        """
        with self._waiting_until(durable) as enqueued:
            if isinstance(requests, Collection):
                parsed = parse_many(requests)
                enqueued += self._submit_all(parsed, parsed)
                return enqueued
            for window in windows(requests):
                enqueued += self._submit_all(window, [None] * len(window), first=len(enqueued))
            return enqueued

    def try_submit(
        self, requests: Sequence[Request], *, by_custom_id: bool = False
    ) -> list[Enqueued | JobError]:
        """Enqueue checked requests. Returns for each its job, or the error of one that is refused.
        Raises JobError if none can be enqueued. `by_custom_id`: custom_id identifies the rows of
        those that have one."""
        self._eviction.require(self.redis)
        refused = refused_templates(self.redis, requests)
        taken = [one for number, one in enumerate(requests) if number not in refused]
        enqueued = iter(enqueue(self.redis, taken, self._result_ttl, by_custom_id=by_custom_id))
        found = [refused.get(number) or next(enqueued) for number in range(len(requests))]
        if self.serving is not None:
            new = zip(requests, found, strict=True)
            self.serving.warn(
                (request.model, operation_for(request).func)
                for request, one in new
                if isinstance(one, Enqueued)
            )
        return found

    def job(self, job_id: str) -> Job:
        """The handle to a job, by its id, whoever submitted it. Sends nothing to Redis. That of a
        scoring job has a ScoreResult."""
        return Job(self.connection, job_id)

    def run(self, run_id: str, results: str | os.PathLike[str] | None = None) -> Run:
        """The handle to a run, by its id, whoever submitted its jobs. Sends nothing to Redis.
        `results`: the folder of the runs, by default $CHATJOBS_RESULTS, then ./results."""
        return Run(self.connection, run_id, results)

    def session(
        self,
        id: str | None = None,
        *,
        model: str | None = None,
        system: str | None = None,
        ttl: int | None = None,
        **fields: Unpack[SessionFields],
    ) -> Session:
        """Open a conversation: the one of this id, or, with `model`, a new one if there is none.

        `system`: its system message. `ttl`: seconds after its last change at which it expires, by
        default 7 days. `fields`: of all its requests, such as `temperature`. They are kept with the
        session: other ones than it was created with raise InvalidRequest.
        """
        steps = open_session(id, needed_model(id, model), system, ttl, dict(fields))
        return Session(self.submit, self.connection, run_sync(steps, self.connection))

    def as_completed(
        self, jobs: Iterable[Job[R, Q]], timeout: float | None = None
    ) -> Iterator[Job[R, Q]]:
        """The jobs as they end, each once, also those that fail: `job.result()` has the outcome.

        Raises WaitTimeout when some have not ended `timeout` seconds after the first step.
        """
        by_id: dict[str, Job[R, Q]] = {job.id: job for job in jobs_in(jobs, Job)}
        for job_id in iterate_sync(follow_ends(by_id, timeout), self.connection):
            yield by_id[job_id]

    @overload
    def gather(
        self,
        *jobs: Job[R, Q] | Iterable[Job[R, Q]],
        timeout: float | None = None,
        return_exceptions: Literal[False] = False,
    ) -> list[R]: ...
    @overload
    def gather(
        self,
        *jobs: Job[R, Q] | Iterable[Job[R, Q]],
        timeout: float | None = None,
        return_exceptions: bool,
    ) -> list[R | JobError]: ...
    def gather(
        self,
        *jobs: Job[Any, Any] | Iterable[Job[Any, Any]],
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """The results of all jobs, in the order of the arguments: jobs, or lists of jobs.

        The first job that fails raises its JobError, and the others go on; with
        `return_exceptions` its error takes the place of its result. Raises WaitTimeout
        when some have not ended after `timeout` seconds.
        """
        ids = [job.id for job in jobs_in(jobs, Job)]
        return run_sync(gather_outcomes(ids, timeout, return_exceptions), self.connection)

    def wait_for_rows(self, jobs: Iterable[Job[Any, Any]], timeout: float | None = None) -> None:
        """Wait until all jobs have ended and their rows are in Parquet, which are written at once.

        Failed and cancelled jobs have a row too. Raises WaitTimeout, which says whether jobs
        have not ended or rows are not written yet.
        """
        requests = kept_requests(jobs_in(jobs, Job))
        run_sync(wait_for_rows(requests, timeout), self.connection)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _waiting_until(self, durable: bool) -> Iterator[list[Job[Any, Any]]]:
        """Takes the jobs that the block enqueues, and waits for them if `durable`."""
        enqueued: list[Job[Any, Any]] = []
        try:
            waiting = DurableSubmit(self.redis) if durable else None
            yield enqueued
            if waiting is not None:
                waiting.wait([job.id for job in enqueued])
        except RedisError as error:
            raise redis_failure(self.redis, error) from error

    def _submit_all(
        self, requests: list[Request], kept: Sequence[Request | None], first: int = 0
    ) -> list[Job[Any, Any]]:
        """Enqueue checked requests, or raise the error of the first one that is refused. `kept`:
        the requests that the jobs keep. `first`: the number of the first request."""
        found = self.try_submit(requests)
        refused = [(n, one) for n, one in enumerate(found) if isinstance(one, JobError)]
        if refused:
            raise first_refusal(refused, len(found), first)
        enqueued = [one for one in found if isinstance(one, Enqueued)]
        return [
            Job(
                self.connection,
                one.id,
                request,
                existed_before=one.existed_before,
                ended_before=one.ended_before,
            )
            for one, request in zip(enqueued, kept, strict=True)
        ]
