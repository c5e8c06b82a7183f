"""Handles to submitted jobs: `Job` blocks, `AsyncJob` is for asyncio.

A handle is an id and a connection, so any process can make one. Clients, sessions and chat
completions return them; no module that this one imports knows them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, cast

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.api.score_request import ScoreRequest
from jobs.api.score_result import ScoreResult
from jobs.client.follow import OnRestart, follow, follow_async
from jobs.client.wait import wait_for_result
from jobs.errors import invalid
from jobs.keys import JOB_ID
from jobs.operations import Request
from jobs.store.connection.protocol import Connection, run_async, run_sync
from jobs.store.job_end import cancel
from jobs.store.job_state import Status, read_request, read_status

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # Its result and its request; a plain `Job` is one of a chat.
    R = TypeVar("R", default=ChatCompletion)
    Q = TypeVar("Q", default=ChatRequest)
else:
    from typing import TypeVar

    R, Q = TypeVar("R"), TypeVar("Q")


class Job(Generic[R, Q]):
    """The handle to one submitted job: an id and a connection. All methods raise JobError.

    existed_before: nothing was enqueued, since the same id or row was submitted before, and its job
    is in Redis. ended_before: the same, but its job has ended and left Redis: its answer is in the
    results.
    """

    def __init__(
        self,
        connection: Connection,
        job_id: str,
        request: Request | None = None,
        *,
        existed_before: bool = False,
        ended_before: bool = False,
    ) -> None:
        self.id = check_id(job_id)
        self.existed_before, self.ended_before = existed_before, ended_before
        self._connection = connection
        self._request = request

    def stream(
        self,
        after: str | None = None,
        *,
        timeout: float | None = None,
        on_restart: OnRestart = "raise",
    ) -> Iterator[ChatChunk]:
        """The chunks of the answer, from the start to the end, as they are generated: each part of
        it once, also if the job starts again on another worker.

        `after` is the `cursor` of an earlier chunk: the stream resumes after it. `timeout`: seconds
        from one chunk to the next, the wait for a worker included; then WaitTimeout is raised, and
        the job goes on. `on_restart` says what happens if the job has started again and its answer
        differs from the part that was read: "raise" raises StreamRestarted; with "reset" a chunk
        whose `reset` is True says to discard all chunks before it, and the new answer follows. Any
        number of readers may follow a job. A job that doesn't stream gives its whole answer at the
        end.
        """
        return follow(self._connection, self.id, after, timeout=timeout, on_restart=on_restart)

    def result(self, timeout: float | None = None) -> R:
        """Wait for the whole answer, up to `timeout` seconds (then WaitTimeout): a ChatCompletion,
        or a ScoreResult of a scoring job."""
        return cast("R", run_sync(wait_for_result(self.id, timeout), self._connection))

    def status(self) -> Status:
        """The state of the job now."""
        return run_sync(read_status(self.id), self._connection)

    def cancel(self) -> bool:
        """Stop the job; one that is running stops soon after. False if it had already ended."""
        return run_sync(cancel(self.id), self._connection)

    @property
    def request(self) -> Q:
        """The request as it was submitted: a ChatRequest or a ScoreRequest."""
        if self._request is None:
            self._request = run_sync(read_request(self.id), self._connection)
        return cast("Q", self._request)

    def __repr__(self) -> str:
        return f"Job({self.id!r})"


class AsyncJob(Generic[R, Q]):
    """The handle to one submitted job, see `Job`. All methods raise JobError."""

    def __init__(
        self,
        connection: Connection,
        job_id: str,
        request: Request | None = None,
        *,
        existed_before: bool = False,
        ended_before: bool = False,
    ) -> None:
        self.id = check_id(job_id)
        self.existed_before, self.ended_before = existed_before, ended_before
        self._connection = connection
        self._request = request

    def stream(
        self,
        after: str | None = None,
        *,
        timeout: float | None = None,
        on_restart: OnRestart = "raise",
    ) -> AsyncIterator[ChatChunk]:
        """The chunks of the answer as they are generated, see `Job.stream`."""
        return follow_async(
            self._connection, self.id, after, timeout=timeout, on_restart=on_restart
        )

    async def result(self, timeout: float | None = None) -> R:
        """Wait for the whole answer, up to `timeout` seconds (then WaitTimeout), see `Job`."""
        return cast("R", await run_async(wait_for_result(self.id, timeout), self._connection))

    async def status(self) -> Status:
        """The state of the job now."""
        return await run_async(read_status(self.id), self._connection)

    async def cancel(self) -> bool:
        """Stop the job; one that is running stops soon after. False if it had already ended."""
        return await run_async(cancel(self.id), self._connection)

    @property
    def request(self) -> Coroutine[Any, Any, Q]:
        """The request as it was submitted, see `Job`: `await job.request`."""
        return self._read_request()

    async def _read_request(self) -> Q:
        if self._request is None:
            self._request = await run_async(read_request(self.id), self._connection)
        return cast("Q", self._request)

    def __repr__(self) -> str:
        return f"AsyncJob({self.id!r})"


ScoreJob: TypeAlias = Job[ScoreResult, ScoreRequest]
AsyncScoreJob: TypeAlias = AsyncJob[ScoreResult, ScoreRequest]


def for_asyncio(job: Job[R, Q], connection: Connection) -> AsyncJob[R, Q]:
    """The handle to the same job for asyncio. Sends nothing to Redis."""
    return AsyncJob(
        connection,
        job.id,
        job._request,
        existed_before=job.existed_before,
        ended_before=job.ended_before,
    )


def kept_requests(jobs: Iterable[Job[Any, Any] | AsyncJob[Any, Any]]) -> dict[str, Request | None]:
    """The requests that handles keep, by job id; None for a request that only Redis has."""
    return {job.id: job._request for job in jobs}


def check_id(job_id: str) -> str:
    """`job_id`, if it is a valid one. Raises InvalidRequest."""
    if not isinstance(job_id, str) or not JOB_ID.fullmatch(job_id):
        raise invalid(
            f"a job id consists of letters, digits, '_' and '-', up to 200; got {job_id!r}", "id"
        )
    return job_id
