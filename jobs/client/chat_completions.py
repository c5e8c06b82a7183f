"""`client.chat.completions.create`, with the arguments and the answers of the openai package.

Each call is a job of its own. A caller that stops waiting cancels it, so that no worker spends time
on an answer that nobody reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, Unpack, overload

from jobs.api.answer import ChatCompletion
from jobs.api.caller import warn_caller
from jobs.api.chunk import ChatChunk
from jobs.api.params import CompletionFields
from jobs.api.request import ChatRequest, IgnoredFieldWarning
from jobs.client.cancelling_waits import (
    answer_of,
    answer_of_async,
    cancelling_from_submit,
    follow_or_cancel,
    submitted,
)
from jobs.client.job import AsyncJob, Job
from jobs.errors import JobError
from jobs.store.connection.protocol import Connection, iterate_async, iterate_sync


class Chat:
    """`client.chat`: the attribute `completions`."""

    def __init__(self, submit: Callable[[ChatRequest], Job], connection: Connection) -> None:
        self.completions = Completions(submit, connection)


class Completions:
    """`client.chat.completions`: the method `create`."""

    def __init__(self, submit: Callable[[ChatRequest], Job], connection: Connection) -> None:
        self._submit, self._connection = submit, connection

    @overload
    def create(
        self, *, stream: Literal[False] | None = None, **fields: Unpack[CompletionFields]
    ) -> ChatCompletion: ...
    @overload
    def create(
        self, *, stream: Literal[True], **fields: Unpack[CompletionFields]
    ) -> ChatStream: ...
    @overload
    def create(
        self, *, stream: bool, **fields: Unpack[CompletionFields]
    ) -> ChatCompletion | ChatStream: ...
    def create(self, *, stream: bool | None = None, **fields: Any) -> ChatCompletion | ChatStream:
        """Run one request and return its answer, or with `stream` its chunks.

        The arguments are those of openai's method of this name. `extra_body` takes all other
        fields of a ChatRequest, such as top_k and job. `timeout`: seconds until the answer, or with
        `stream` from one chunk to the next; of an openai.Timeout, `read` counts; None: no limit.
        Raises JobError. Ctrl-C cancels the job; while it is submitted, only if `job` in
        `extra_body` names neither its id nor its row.
        """
        call = _read_call(bool(stream), fields)
        with cancelling_from_submit(call.request, self._connection) as request:
            job = self._submit(request)
            if stream:
                steps = follow_or_cancel(job.id, call.timeout)
                return ChatStream(job, iterate_sync(steps, self._connection))
            return answer_of(job.id, self._connection, call.timeout)


class ChatStream:
    """The chunks of one answer, as they are generated: an iterator, as openai's `Stream`.

    If the worker is lost, another one starts the job again, and the stream goes on without a
    repetition. If the new answer differs from the part that was read, or no chunk comes within the
    `timeout`, StreamRestarted or WaitTimeout is raised and the job is cancelled. So it is when the
    stream is closed before its end, as at the end of a `with` block.
    """

    def __init__(self, job: Job, chunks: Iterator[ChatChunk]) -> None:
        self.job = job
        self._chunks = chunks
        self._over = False

    def __iter__(self) -> Iterator[ChatChunk]:
        return self

    def __next__(self) -> ChatChunk:
        if self._over:
            raise StopIteration
        try:
            return next(self._chunks)
        except (StopIteration, JobError):
            self._over = True
            raise

    def close(self) -> None:
        """Stop reading; the job is cancelled unless it has ended."""
        if not self._over:
            self._over = True
            with suppress(JobError):
                self.job.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncChat:
    """`client.chat` of an AsyncClient: the attribute `completions`."""

    def __init__(
        self, submit: Callable[[ChatRequest], Awaitable[AsyncJob]], connection: Connection
    ) -> None:
        self.completions = AsyncCompletions(submit, connection)


class AsyncCompletions:
    """`client.chat.completions` of an AsyncClient: the method `create`."""

    def __init__(
        self, submit: Callable[[ChatRequest], Awaitable[AsyncJob]], connection: Connection
    ) -> None:
        self._submit, self._connection = submit, connection

    @overload
    async def create(
        self, *, stream: Literal[False] | None = None, **fields: Unpack[CompletionFields]
    ) -> ChatCompletion: ...
    @overload
    async def create(
        self, *, stream: Literal[True], **fields: Unpack[CompletionFields]
    ) -> AsyncChatStream: ...
    @overload
    async def create(
        self, *, stream: bool, **fields: Unpack[CompletionFields]
    ) -> ChatCompletion | AsyncChatStream: ...
    async def create(
        self, *, stream: bool | None = None, **fields: Any
    ) -> ChatCompletion | AsyncChatStream:
        """Run one request, see `Completions.create`."""
        call = _read_call(bool(stream), fields)
        job = await submitted(self._submit(call.request))
        if stream:
            steps = follow_or_cancel(job.id, call.timeout)
            return AsyncChatStream(job, iterate_async(steps, self._connection))
        return await answer_of_async(job.id, self._connection, call.timeout)


class AsyncChatStream:
    """`ChatStream` for asyncio, as openai's `AsyncStream`."""

    def __init__(self, job: AsyncJob, chunks: AsyncIterator[ChatChunk]) -> None:
        self.job = job
        self._chunks = chunks
        self._over = False

    def __aiter__(self) -> AsyncIterator[ChatChunk]:
        return self

    async def __anext__(self) -> ChatChunk:
        if self._over:
            raise StopAsyncIteration
        try:
            return await anext(self._chunks)
        except (StopAsyncIteration, JobError):
            self._over = True
            raise

    async def close(self) -> None:
        """Stop reading; the job is cancelled unless it has ended."""
        if not self._over:
            self._over = True
            with suppress(JobError):
                await self.job.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


class _Call(NamedTuple):
    request: ChatRequest
    timeout: float | None


def _read_call(stream: bool, fields: dict[str, Any]) -> _Call:
    """The arguments of `create`, checked. Raises TypeError, as Python does, and InvalidRequest."""
    for name in fields:
        if name not in CompletionFields.__annotations__:
            hint = "" if name not in ChatRequest.model_fields else ": put it into extra_body"
            raise TypeError(f"create() got an unexpected keyword argument {name!r}{hint}")
    for name in sorted(CompletionFields.__required_keys__ - fields.keys()):
        raise TypeError(f"create() missing the required keyword argument {name!r}")
    given = {name: value for name, value in fields.items() if not _is_not_given(value)}
    timeout = _seconds(given.pop("timeout", None))
    without_effect = [name for name in ("extra_headers", "extra_query") if given.pop(name, None)]
    if without_effect:
        names = " and ".join(without_effect)
        warn_caller(f"there is no HTTP request: {names} are ignored", IgnoredFieldWarning)
    extra = given.pop("extra_body", None) or {}
    body = {**given, **extra, "stream": stream}
    return _Call(ChatRequest.parse(body), timeout)


def _seconds(timeout: Any) -> float | None:
    """The limit of a wait: a number, or of openai's Timeout (httpx's, by several packages) the time
    without data. The other times of that are for connections, which are there already. Raises
    TypeError."""
    if type(timeout).__name__ == "Timeout" and hasattr(timeout, "read"):
        timeout = timeout.read
    if isinstance(timeout, bool) or not isinstance(timeout, float | int | None):
        raise TypeError(
            f"create() takes a timeout in seconds, or an openai.Timeout, got {timeout!r}"
        )
    return timeout


def _is_not_given(value: Any) -> bool:
    """openai's NOT_GIVEN and omit stand for arguments that are absent."""
    kind = type(value)
    return kind.__name__ in ("NotGiven", "Omit") and kind.__module__.partition(".")[0] == "openai"
