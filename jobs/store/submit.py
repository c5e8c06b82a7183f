"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs.api.params import RequestFields
from jobs.api.request import ChatRequest
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.sizes import counted
from jobs.store.damage import is_damage, wrong_types
from jobs.store.new_job import ENQUEUE, NewJob, is_unwritten, new_job
from jobs.store.refusals import (
    custom_id_taken,
    id_taken,
    queue_full,
    redis_full,
    row_taken,
    too_large,
)
from jobs.store.rq_format import (
    DATA,
    MAX_DATA,
    format_time,
    job_key,
)
from jobs.store.turns import refused

# Type checkers know the keys of a plain dict; at run time any mapping is taken, and checked.
RequestInput: TypeAlias = ChatRequest | RequestFields

BATCH = 500  # jobs per round trip


class Enqueued(NamedTuple):
    """The job of a request. Nothing was enqueued if the request was submitted before:
    `existed_before`: its job is in Redis; `ended_before`: its job has ended and left Redis."""

    id: str
    existed_before: bool
    ended_before: bool


def parse_many(requests: Iterable[RequestInput], first: int = 0) -> list[ChatRequest]:
    """All requests, checked. Raises InvalidRequest, naming the number of the bad one, counted from
    `first`."""
    _check_many(requests)
    parsed = []
    for number, request in enumerate(requests, first):
        try:
            parsed.append(ChatRequest.parse(request))
        except InvalidRequest as error:
            raise invalid(f"request {number}: {error.message}", error.param) from None
    return parsed


def _check_many(requests: Iterable[RequestInput]) -> None:
    """Raise InvalidRequest for one request, which can be iterated over as well."""
    if isinstance(requests, ChatRequest | Mapping | str | bytes):
        raise invalid("submit_many takes a list or an iterator of requests, got one request")


def windows(requests: Iterable[RequestInput]) -> Iterator[list[ChatRequest]]:
    """The requests, checked, in lists of BATCH. Raises InvalidRequest with the number of the bad
    one, and how many are in the lists before."""
    _check_many(requests)
    source, done = iter(requests), 0
    while window := list(islice(source, BATCH)):
        try:
            parsed = parse_many(window, done)
        except InvalidRequest as error:
            enqueued = f"{counted(done, 'request')} {'is' if done == 1 else 'are'} enqueued"
            raise invalid(f"{error.message}; {enqueued}", error.param) from None
        yield parsed
        done += len(window)


def check_result_ttl(seconds: int) -> int:
    """`seconds`, if results can be kept for them. Raises InvalidRequest."""
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 < seconds < 2**31:
        raise invalid(f"result_ttl: a whole number of seconds from 1 on, got {seconds!r}")
    return seconds


def enqueue(
    redis: Redis,
    requests: Sequence[ChatRequest],
    result_ttl: int | None = None,
    *,
    by_custom_id: bool = False,
) -> list[Enqueued | JobError]:
    """Put requests into their queues, in order. Returns their jobs, and why others are refused.
    `result_ttl`: of requests that have none. `by_custom_id`: custom_id identifies the rows of those
    that have one.

    A request whose job is in Redis already, by its id or its row, gives that job.
    """
    # All of them, before the first one is sent.
    jobs = [new_job(request, by_custom_id=by_custom_id) for request in requests]
    _check_sizes(jobs)
    found: list[Enqueued | JobError] = []
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        replies = _send(redis, batch, [b""] * len(batch), result_ttl)
        _replace_abandoned(redis, batch, replies, result_ttl)
        for job, reply in zip(batch, replies, strict=True):
            enqueued = Enqueued(job.id, reply == [b"same"], reply == [b"ended"])
            found.append(_refusal(redis, job, reply) or enqueued)
    return found


def _send(
    redis: Redis, jobs: Sequence[NewJob], abandoned: Sequence[bytes], result_ttl: int | None
) -> list[Any]:
    """The replies to the scripts of some jobs, in one round trip. `abandoned`: the reservation that
    each replaces, empty for none."""
    script = redis.register_script(ENQUEUE)
    pipeline: Any = redis.pipeline(transaction=False)  # its stubs lack `scripts`
    pipeline.scripts.add(script)
    now = format_time()
    for job, reservation in zip(jobs, abandoned, strict=True):
        names = job.script_keys(reservation)
        args = job.script_args(now, result_ttl, reservation)
        pipeline.execute_command("EVALSHA", script.sha, len(names), *names, *args)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _replace_abandoned(
    redis: Redis, jobs: Sequence[NewJob], replies: list[Any], result_ttl: int | None
) -> None:
    """Send again what was refused for the reservation of another request, if the job of that has
    left Redis without a row, as after `rq empty`: nobody would ever write the row."""
    held = {
        number: reply[1]
        for number, reply in enumerate(replies)
        if isinstance(reply, list) and reply[0] == b"row" and is_unwritten(reply[1])
    }
    if not held:
        return
    pipeline = redis.pipeline(transaction=False)
    for number, reservation in held.items():
        pipeline.exists(job_key(jobs[number].job_of(reservation)))
    exists = dict(zip(held, pipeline.execute(), strict=True))
    again = [number for number in held if not exists[number]]
    if again:
        batch = [jobs[number] for number in again]
        for number, reply in zip(
            again, _send(redis, batch, [held[number] for number in again], result_ttl), strict=True
        ):
            replies[number] = reply


def _check_sizes(jobs: Sequence[NewJob]) -> None:
    """Raises InvalidRequest for a request that no worker would read, whatever the limits."""
    for number, job in enumerate(jobs):
        if job.request_bytes > MAX_DATA:
            error = too_large("request_bytes", job.request_bytes, MAX_DATA)
            which = f"request {number}: " if len(jobs) > 1 else ""
            raise invalid(f"{which}{error.message}; nothing was enqueued")


def _refusal(redis: Redis, job: NewJob, reply: Any) -> JobError | None:
    """Why a request was refused, from the reply to its script. None: its job is in Redis."""
    if isinstance(reply, OutOfMemoryError):
        stored: Any = redis.hget(job_key(job.id), DATA)
        # The script may have run before Redis was full, and its reply was lost.
        return None if stored == job.data else redis_full(redis)
    if isinstance(reply, Exception):
        if is_damage(reply) and (damaged := wrong_types(redis, job.all_keys())):
            raise JobError("internal", f"the job can't be enqueued: {damaged[0]}")
        raise reply
    if reply[0] == b"busy" or reply[0].startswith(b"session"):
        return refused(job.request.job.session or "", job.request.model, reply)
    if job.by_custom_id and reply[0] in (b"row", b"row_moved"):
        return custom_id_taken(job.run, job.request.job.custom_id or "", job.request.job.row)
    if reply[0] == b"row":  # with the other reservation
        return row_taken(job.run, job.request.job.row)
    reason, *numbers = [value.decode() for value in reply]
    match reason:
        case "enqueued" | "same" | "ended":
            return None
        case "id":
            return id_taken(job.id)
        case "jobs" | "bytes":
            return queue_full(job.request.model, reason, *map(int, numbers))
        case _:
            return too_large(reason, *map(int, numbers))
