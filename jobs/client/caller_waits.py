"""Waits of callers for whom a job is run: it is cancelled when they stop waiting."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING

from redis import RedisError

from jobs.api.answer import ChatCompletion
from jobs.client.cancel import cancel
from jobs.client.steps import Steps, run_async, run_sync
from jobs.client.wait import wait_for_result
from jobs.errors import JobError, WaitTimeout

if TYPE_CHECKING:
    from jobs.client.aio import AsyncJob
    from jobs.client.client import Job


def wait_or_cancel(job_id: str, timeout: float | None) -> Steps[ChatCompletion]:
    """The completion of the job. If it has not ended after `timeout` seconds, it is cancelled.

    Raises JobError: the job's own, or WaitTimeout, which says whether the job is cancelled.
    """
    try:
        return (yield from wait_for_result(job_id, timeout))
    except WaitTimeout as error:
        late = error
    try:
        cancelled = yield from cancel(job_id)
    except (JobError, RedisError):
        raise late from None
    if not cancelled:  # it has ended meanwhile
        return (yield from wait_for_result(job_id, None))
    fact = late.message.partition(";")[0]
    raise WaitTimeout(
        f"{fact}, and is cancelled now: give it a longer timeout, or submit it and wait with "
        "job.result, which cancels nothing"
    )


def answer_of(job: Job, timeout: float | None) -> ChatCompletion:
    """`wait_or_cancel` for a caller who may be interrupted."""
    with cancelling(job):
        return run_sync(wait_or_cancel(job.id, timeout), job._connection)


async def answer_of_async(job: AsyncJob, timeout: float | None) -> ChatCompletion:
    """`answer_of` for asyncio."""
    async with cancelling_async(job):
        return await run_async(wait_or_cancel(job.id, timeout), job._connection)


@contextmanager
def cancelling(job: Job) -> Iterator[None]:
    """Cancels the job if the block is left early: by Ctrl-C, or since a generator is closed. A
    JobError is an end of the job."""
    try:
        yield
    except JobError:
        raise
    except BaseException:
        with suppress(JobError):
            job.cancel()
        raise


@asynccontextmanager
async def cancelling_async(job: AsyncJob) -> AsyncIterator[None]:
    """`cancelling` for asyncio, where a cancelled task leaves the block early."""
    try:
        yield
    except JobError:
        raise
    except BaseException:
        with suppress(JobError):
            await job.cancel()
        raise
