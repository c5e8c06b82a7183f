"""Waits that cancel the job when the caller stops waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from redis import RedisError

from jobs.api.answer import ChatCompletion
from jobs.api.chunk import ChatChunk
from jobs.api.request import ChatRequest
from jobs.client.follow import OnRestart, follow_steps
from jobs.client.job import AsyncJob
from jobs.client.wait import GOES_ON, wait_for_result
from jobs.errors import JobError, StreamRestarted, WaitTimeout
from jobs.store.connection.protocol import Connection, Emitting, Steps, ping, run_async, run_sync
from jobs.store.job_end import cancel
from jobs.store.job_state import completion_of
from jobs.store.new_job import new_id


def wait_or_cancel(job_id: str, timeout: float | None) -> Steps[ChatCompletion]:
    """The completion of the job. If it has not ended after `timeout` seconds, it is cancelled.

    Raises JobError: the job's own, or WaitTimeout, which says whether the job is cancelled.
    """
    try:
        return completion_of(job_id, (yield from wait_for_result(job_id, timeout)))
    except WaitTimeout as error:
        late = error
    if (yield from _cancelled(job_id, late)):
        raise _given_up(late)
    # It has ended meanwhile.
    return completion_of(job_id, (yield from wait_for_result(job_id, None)))


def follow_or_cancel(
    job_id: str, timeout: float | None, on_restart: OnRestart = "raise"
) -> Emitting[ChatChunk]:
    """The chunks of the job. If the stream ends before the job does, the job is cancelled.

    Raises JobError: the job's own, or WaitTimeout or StreamRestarted, which say whether the job is
    cancelled.
    """
    try:
        yield from follow_steps(job_id, None, timeout, on_restart)
        return
    except (WaitTimeout, StreamRestarted) as error:
        early = error
    if not (yield from _cancelled(job_id, early)):
        raise early
    if isinstance(early, WaitTimeout):
        raise _given_up(early)
    raise StreamRestarted(
        f"job {job_id} has started again, and its answer differs from the part that was read; it "
        "is cancelled now: discard that part and repeat the request",
        job_id,
    )


def _cancelled(job_id: str, early: JobError) -> Steps[bool]:
    """Cancel the job. False if it had ended. Raises `early` if Redis fails."""
    try:
        return (yield from cancel(job_id))
    except (JobError, RedisError):
        raise early from None


def _given_up(late: WaitTimeout) -> WaitTimeout:
    """The error of a wait whose job is cancelled."""
    return WaitTimeout(
        f"{late.message.removesuffix(GOES_ON)}; it is cancelled now: give it a longer timeout, or "
        "submit it and wait with job.result or job.stream, which cancel nothing"
    )


def answer_of(job_id: str, connection: Connection, timeout: float | None) -> ChatCompletion:
    """`wait_or_cancel` for a caller who may be interrupted."""
    with cancelling(job_id, connection):
        return run_sync(wait_or_cancel(job_id, timeout), connection)


async def answer_of_async(
    job_id: str, connection: Connection, timeout: float | None
) -> ChatCompletion:
    """`answer_of` for asyncio."""
    async with cancelling_async(job_id, connection):
        return await run_async(wait_or_cancel(job_id, timeout), connection)


@contextmanager
def cancelling(job_id: str, connection: Connection) -> Iterator[None]:
    """Cancels the job if the block is left early: by Ctrl-C, or since a generator is closed. A
    JobError is an end of the job."""
    try:
        yield
    except JobError:
        raise
    except BaseException:
        with suppress(JobError):
            run_sync(cancel(job_id), connection)
        raise


@contextmanager
def cancelling_from_submit(request: ChatRequest, connection: Connection) -> Iterator[ChatRequest]:
    """`cancelling` for a block that submits the request it is given, and may be left while Redis
    takes the job. A job that the caller has named, by its id or its row, may be in Redis from an
    earlier call, and stays."""
    if request.job.id is not None or request.job.row is not None:
        yield request
        return
    job_id = new_id()
    options = request.job.model_copy(update={"id": job_id})
    try:
        yield request.model_copy(update={"job": options})
    except JobError:
        raise
    except BaseException:
        with suppress(JobError):
            # Redis has run what was sent over another connection before, when it replies to this.
            run_sync(ping(time.monotonic()), connection)
            run_sync(cancel(job_id), connection)
        raise


@asynccontextmanager
async def cancelling_async(job_id: str, connection: Connection) -> AsyncIterator[None]:
    """`cancelling` for asyncio, where a cancelled task leaves the block early."""
    try:
        yield
    except JobError:
        raise
    except BaseException:
        with suppress(JobError):
            await run_async(cancel(job_id), connection)
        raise


async def submitted(submit: Awaitable[AsyncJob]) -> AsyncJob:
    """The job of a submit, which goes on in a thread if the task is cancelled: the job is then
    cancelled when it is in Redis."""
    submitting = asyncio.ensure_future(submit)
    try:
        return await asyncio.shield(submitting)
    except asyncio.CancelledError:
        with suppress(JobError):
            await (await submitting).cancel()
        raise
