"""The errors of requests that are not enqueued: a sentence for each limit, with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote
from typing import Any

from redis import Redis
from redis.exceptions import NoPermissionError

from jobs.errors import JobError, invalid
from jobs.sizes import counted, size_text, size_texts
from jobs.store.rq_layout import MAX_DATA


def id_taken(job_id: str, model: str | None = None) -> JobError:
    """Another job has the id; `model`: that of a job with the same request but for the model."""
    return invalid(
        f"job.id: {job_id!r} is taken by {_another('job', model)} in Redis, which is unchanged: "
        "choose another id, or none",
        "job.id",
    )


def row_taken(
    run: str,
    row: int | None,
    remedy: str = "choose another job.run or job.row",
    model: str | None = None,
) -> JobError:
    """Another request has the row; `model`: that of the same request but for the model."""
    return invalid(
        f"job.row: row {row} of run {run!r} is taken by {_another('request', model)}: {remedy}",
        "job.row",
    )


def custom_id_taken(
    run: str, custom_id: str, row: int | None, model: str | None = None
) -> JobError:
    """Another request has the custom_id, or its row; `model`: that of the same request but for the
    model."""
    return invalid(
        f"custom_id {custom_id!r}: row {row} of run {run!r} is that of "
        f"{_another('request', model)}, which is unchanged: submit this one in another run, or "
        "with another custom_id",
        "job.custom_id",
    )


def _another(what: str, model: str | None) -> str:
    if model is None:
        return f"another {what}"
    return f"a {what} that differs only in its model, {model!r}"


def queue_full(model: str, unit: str, used: int, limit: int) -> JobError:
    """The model's queues have as many jobs as their limit `unit` ("jobs" or "bytes") allows."""
    if unit == "jobs":
        has = "has" if used == 1 else "have"
        have = f"{counted(used, 'job')} that {has} not ended, and the limit (jobs) is {limit}"
    else:
        used_text, limit_text = size_texts(used, limit)
        have = f"{used_text} of requests, and the limit (bytes) is {limit_text}"
    return JobError(
        "queue_full",
        f"the queue of model {model!r} is full: it has {have}; submit again when some have ended, "
        f"or raise the limit (chatjobs limits --model {quote(model)} {unit}=N)",
    )


def redis_full(client: Redis) -> JobError:
    """Redis has no memory for new jobs."""
    try:
        memory: Any = client.info("memory")
        used, limit = memory["used_memory"], memory["maxmemory"]
        numbers = f"it uses {size_text(used)}, and maxmemory is {size_text(limit)}"
    except NoPermissionError:
        numbers = "this user may not read its numbers (INFO)"
    return JobError(
        "queue_full",
        f"Redis is full: {numbers}; submit again when jobs have ended and their results have "
        "expired, or raise maxmemory",
    )


def too_large(name: str, size: int, limit: int) -> JobError:
    """The request exceeds the limit `name` ("request_bytes" or "message_bytes")."""
    what = "a message of the request" if name == "message_bytes" else "the request"
    has, most = size_texts(size, limit)
    can_be_raised = limit < MAX_DATA
    remedy = f", or raise the limit (chatjobs limits {name}=N)" if can_be_raised else ""
    return invalid(
        f"{what} has {has} as JSON, and the limit ({name}) is {most}: shorten it{remedy}",
        "messages",
    )


def first_refusal(refused: Sequence[tuple[int, JobError]], count: int, first: int) -> JobError:
    """The error of the first of the refused requests, which says how many are enqueued: of `count`
    requests, after `first` that are."""
    number, error = refused[0][0] + first, refused[0][1]
    total = first + count
    if total == 1:
        return error
    more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
    enqueued = total - len(refused)
    are = f"{'is' if enqueued == 1 else 'are'} enqueued"
    message = f"request {number}{more}: {error.message}; {enqueued} of {total} requests {are}"
    return JobError.from_dict({**error.to_dict(), "message": message})
