"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias

from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.api.params import RequestFields, ScoreFields
from jobs.api.request import ChatRequest
from jobs.api.row_keys import named_rows
from jobs.api.score_request import ScoreRequest
from jobs.errors import InvalidRequest, JobError, invalid
from jobs.operations import Request, operation_for, parse_request
from jobs.results.outbox import run_of
from jobs.sizes import counted
from jobs.store.damage import Damaged, damage_of
from jobs.store.enqueue_errors import (
    custom_id_taken,
    id_taken,
    queue_full,
    redis_full,
    row_taken,
    too_large,
)
from jobs.store.expiry import BULK_RESULT_SECONDS, FAILURE_SECONDS, RESULT_SECONDS, ROW_SECONDS
from jobs.store.limits import DEFAULTS
from jobs.store.preludes import QUEUE_LUA, RESERVATIONS_LUA, TURNS_LUA
from jobs.store.reservations import (
    DIGEST_BYTES,
    NewRow,
    ReservedRows,
    digest_of,
    is_unwritten,
    job_of,
    reserved_rows,
    row_job,
)
from jobs.store.rq_layout import (
    DATA,
    MAX_DATA,
    QUEUES_KEY,
    TENANT,
    deferred_key,
    encode_call,
    format_time,
    job_key,
    queue_key,
    queued_fields,
    results_key,
    scheduled_key,
    wip_key,
)
from jobs.store.turns import refused

# Type checkers know the keys of a plain dict; at run time any mapping is taken, and checked.
ChatInput: TypeAlias = ChatRequest | RequestFields
ScoreInput: TypeAlias = ScoreRequest | ScoreFields
RequestInput: TypeAlias = ChatInput | ScoreInput

BATCH = 500  # jobs per round trip
RESULT_TTLS = {"interactive": RESULT_SECONDS, "bulk": BULK_RESULT_SECONDS}

_to_json = json.JSONEncoder(separators=(",", ":")).encode

ENQUEUE = lua.load("jobs.store", "enqueue", QUEUE_LUA, TURNS_LUA, RESERVATIONS_LUA)


# KEYS and ARGV of enqueue.lua, by name and in order.


class EnqueueKeys(NamedTuple):
    job: str
    queue: str
    wip: str
    quarantine: str
    scheduled: str
    deferred: str
    other_queue: str
    other_wip: str
    other_quarantine: str
    other_scheduled: str
    other_deferred: str
    queues: str
    log: str
    results: str
    open_bytes: str
    limits: str
    deadlines: str
    abandoned_job: str
    ids: str
    next_row: str
    producer: str


class EnqueueArgs(NamedTuple):
    job_id: str
    model: str
    data: bytes
    request_bytes: int
    message_bytes: int
    fields: str
    digests: bytes
    item_job: str
    custom_id: bytes
    row_number: int | str
    row_seconds: int
    abandoned: bytes
    at: int | str
    delay: int | str
    ttl: int | str
    max_jobs: int
    max_bytes: int
    max_request_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    holder: str
    session: str
    session_waits: int


class Abandoned(NamedTuple):
    """The reservation of a row by another request, to be replaced if its job is gone."""

    reservation: bytes
    job: str


class NewJob(NamedTuple):
    id: str
    request: Request
    run: str
    request_bytes: int
    message_bytes: int
    data: bytes
    digest: bytes  # of the content, of a request with rows
    rows: Sequence[NewRow]
    reserved: ReservedRows
    by_custom_id: bool = False  # custom_id identifies the row
    holder: str = ""  # token of the lease on the run that the caller must hold; "": none

    def script_keys(self, abandoned: Abandoned | None = None) -> list[str]:
        """EnqueueKeys and the hashes of the rows."""
        options, job = self.request.job, job_key(self.id)
        ids, next_row = job, job
        if self.by_custom_id:
            ids = keys.custom_ids(self.run, options.custom_id or "")
            next_row = keys.next_row(self.run)
        named = _keys_of(self.request.model, options.priority)._replace(
            job=job,
            log=keys.log(self.id),
            results=results_key(self.id),
            abandoned_job=job if abandoned is None else job_key(abandoned.job),
            ids=ids,
            next_row=next_row,
            producer=keys.producer(self.run) if self.holder else job,
        )
        return [*named, *self.reserved.hashes]

    def all_keys(self) -> list[str]:
        """Every key that the script reads or writes."""
        options = self.request.job
        queue = keys.queue(self.request.model, options.priority)
        names = [*self.script_keys(), keys.TENANT_JOBS]
        if options.tenant is not None:
            names += (keys.tenants(queue), keys.tenant_queue(queue, options.tenant))
        if options.session is not None:
            session = options.session
            names += (keys.session(session), keys.turns(session), keys.open_turns(session))
        return names

    def script_args(
        self, now: str, result_ttl: int | None, abandoned: Abandoned | None = None
    ) -> list[Any]:
        """The named arguments, then field, value, … of the hash."""
        model, options = self.request.model, self.request.job
        named = EnqueueArgs(
            job_id=self.id,
            model=model,
            data=self.data,
            request_bytes=self.request_bytes,
            message_bytes=self.message_bytes,
            fields=self.reserved.fields,
            digests=b"".join(one.digest for one in self.rows),
            item_job=self.id if isinstance(self.request, ScoreRequest) else "",
            custom_id=custom_id_digest(options.custom_id or "") if self.by_custom_id else b"",
            row_number=(options.row or 0) if self.by_custom_id else "",
            row_seconds=ROW_SECONDS,
            abandoned=b"" if abandoned is None else abandoned.reservation,
            at="" if options.at is None else round(1000 * options.at.timestamp()),
            delay="" if options.delay is None else round(1000 * options.delay),
            ttl="" if options.ttl is None else max(1, round(1000 * options.ttl)),
            max_jobs=DEFAULTS.jobs,
            max_bytes=DEFAULTS.bytes,
            max_request_bytes=DEFAULTS.request_bytes,
            max_message_bytes=DEFAULTS.message_bytes,
            max_session_bytes=DEFAULTS.session_bytes,
            holder=self.holder,
            session=options.session or "",
            session_waits=int(options.turn is not None and options.turn.wait),
        )
        keep = options.result_ttl or result_ttl or RESULT_TTLS[options.priority]
        title = operation_for(self.request).title
        fields = _hash_fields(title, model, options.priority, now, keep)
        tenant = () if options.tenant is None else (TENANT, options.tenant)
        return [*named, *fields, *tenant]


@lru_cache(maxsize=64)
def _keys_of(model: str, priority: str) -> EnqueueKeys:
    """The keys of the queue; those of one job are empty."""
    other = "interactive" if priority == "bulk" else "bulk"
    queue, other_queue = keys.queue(model, priority), keys.queue(model, other)
    return EnqueueKeys(
        job="",
        queue=queue_key(queue),
        wip=wip_key(queue),
        quarantine=keys.quarantine(queue),
        scheduled=scheduled_key(queue),
        deferred=deferred_key(queue),
        other_queue=queue_key(other_queue),
        other_wip=wip_key(other_queue),
        other_quarantine=keys.quarantine(other_queue),
        other_scheduled=scheduled_key(other_queue),
        other_deferred=deferred_key(other_queue),
        queues=QUEUES_KEY,
        log="",
        results="",
        open_bytes=keys.OPEN_BYTES,
        limits=keys.LIMITS,
        deadlines=keys.DEADLINES,
        abandoned_job="",
        ids="",
        next_row="",
        producer="",
    )


@lru_cache(maxsize=64)
def _hash_fields(
    title: str, model: str, priority: str, now: str, result_ttl: int
) -> tuple[Any, ...]:
    """Field, value, … of the hash of a job that is queued now."""
    fields = queued_fields(
        now=now,
        queue=keys.queue(model, priority),
        description=f"{title} with {model[:100]}",  # RQ's own contains the prompt
        result_ttl=result_ttl,
        failure_ttl=FAILURE_SECONDS,
    )
    return tuple(chain.from_iterable(fields.items()))


def is_keyed(request: Request) -> bool:
    """True if custom_id identifies the row of the request; `job.row` is then a proposal."""
    options = request.job
    return options.run is not None and options.row is not None and options.custom_id is not None


def custom_id_digest(custom_id: str) -> bytes:
    """The field of a custom_id in its hash of rows."""
    return hashlib.blake2b(custom_id.encode(), digest_size=DIGEST_BYTES).digest()


def new_job(request: Request, *, by_custom_id: bool = False, holder: str = "") -> NewJob:
    """`by_custom_id`: custom_id identifies the row of a request that has one. `holder`: see
    `enqueue`."""
    content = request.to_dict()
    run, job_id = run_of(content), request.job.id
    keyed = by_custom_id and is_keyed(request)
    has_items = isinstance(request, ScoreRequest)
    named = named_rows(content)
    # All of it becomes JSON once: the sizes and the digests come from the texts of the job.
    name = "items" if has_items else "messages"
    listed = name in content
    parts = [_to_json(part) for part in content.pop(name, ())]
    options = content.pop("job")
    options.pop("id", None)
    common = _to_json(content)[1:-1]
    first = f'"{name}":[{",".join(parts)}],' if listed else ""
    text = f'{{{first}{common},"job":{_to_json(options)}}}'
    digest = b""
    if named:
        digest = digest_of(text + (job_id or ""))
        job_id = job_id or row_job(run, next(iter(named.values()))[0], digest)
    job_id = job_id or _new_id()
    rows = [
        NewRow(row, repeat, digest_of(common + parts[place]) if has_items else digest)
        for place, (row, repeat) in named.items()
    ]
    comma = "," if options else ""
    text = f'{text[:-2]}{comma}"id":"{job_id}"}}}}'
    call, data = encode_call(operation_for(request).func, "request", text)
    longest = 0 if has_items else max(map(len, parts), default=0)
    return NewJob(
        id=job_id,
        request=request,
        run=run,
        request_bytes=len(call),
        message_bytes=longest,
        data=data,
        digest=digest,
        rows=rows,
        reserved=reserved_rows(run, named.values()),
        by_custom_id=keyed,
        holder=holder,
    )


def _new_id() -> str:
    """A job id of 32 hex digits that sorts by creation time."""
    return f"{time.time_ns() // 1000:014x}{secrets.token_hex(9)}"


class LeaseLost(Exception):
    """Another process holds the lease on a run, or nobody does: nothing was changed."""


class Enqueued(NamedTuple):
    """The job of a request. Nothing was enqueued if the request was submitted before:
    `existed_before`: its job is in Redis; `ended_before`: its job has ended and left Redis."""

    id: str
    existed_before: bool
    ended_before: bool


def parse_many(requests: Iterable[RequestInput], first: int = 0) -> list[Request]:
    """All requests, checked. Raises InvalidRequest, naming the number of the bad one, counted from
    `first`."""
    _check_many(requests)
    parsed: list[Request] = []
    for number, request in enumerate(requests, first):
        try:
            parsed.append(parse_request(request))
        except InvalidRequest as error:
            raise invalid(f"request {number}: {error.message}", error.param) from None
    return parsed


def _check_many(requests: Iterable[RequestInput]) -> None:
    """Raise InvalidRequest for one request, which can be iterated over as well."""
    if isinstance(requests, ChatRequest | ScoreRequest | Mapping | str | bytes):
        raise invalid("submit_many takes a list or an iterator of requests, got one request")


def windows(requests: Iterable[RequestInput]) -> Iterator[list[Request]]:
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
    requests: Sequence[Request],
    result_ttl: int | None = None,
    *,
    by_custom_id: bool = False,
    holder: str = "",
) -> list[Enqueued | JobError]:
    """Put requests into their queues, in order. Returns their jobs, and why others are refused.
    `result_ttl`: of requests that have none. `by_custom_id`: custom_id identifies the rows of those
    that have one. `holder`: token of the lease on their run; raises LeaseLost if another process
    holds it.

    A request whose job is in Redis already, by its id or its row, gives that job.
    """
    # All of them, before the first one is sent.
    jobs = [new_job(one, by_custom_id=by_custom_id, holder=holder) for one in requests]
    _check_sizes(jobs)
    found: list[Enqueued | JobError] = []
    for start in range(0, len(jobs), BATCH):
        batch = jobs[start : start + BATCH]
        replies = _send(redis, batch, [None] * len(batch), result_ttl)
        _replace_abandoned(redis, batch, replies, result_ttl)
        for job, reply in zip(batch, replies, strict=True):
            enqueued = Enqueued(job.id, reply == [b"same"], reply == [b"ended"])
            found.append(_refusal(redis, job, reply) or enqueued)
    return found


def _send(
    redis: Redis,
    jobs: Sequence[NewJob],
    abandoned: Sequence[Abandoned | None],
    result_ttl: int | None,
) -> list[Any]:
    """The replies to the scripts of some jobs, in one round trip. `abandoned`: the reservation that
    each replaces."""
    script = redis.register_script(ENQUEUE)
    pipeline: Any = redis.pipeline(transaction=False)  # its stubs lack `scripts`
    pipeline.scripts.add(script)
    now = format_time()
    for job, other in zip(jobs, abandoned, strict=True):
        names = job.script_keys(other)
        args = job.script_args(now, result_ttl, other)
        pipeline.execute_command("EVALSHA", script.sha, len(names), *names, *args)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _replace_abandoned(
    redis: Redis, jobs: Sequence[NewJob], replies: list[Any], result_ttl: int | None
) -> None:
    """Send again what was refused for the reservation of another request, if the job of that has
    left Redis without a row, as after `rq empty`: nobody would ever write the row."""
    held: dict[int, Abandoned] = {}
    for number, reply in enumerate(replies):
        if isinstance(reply, list) and reply[0] == b"row" and is_unwritten(reply[1]):
            row = _taken_row(jobs[number], reply)
            held[number] = Abandoned(reply[1], job_of(reply[1], jobs[number].run, row))
    if not held:
        return
    pipeline = redis.pipeline(transaction=False)
    for other in held.values():
        pipeline.exists(job_key(other.job))
    exists = dict(zip(held, pipeline.execute(), strict=True))
    again = [number for number in held if not exists[number]]
    if again:
        batch, others = [jobs[number] for number in again], [held[number] for number in again]
        sent = _send(redis, batch, others, result_ttl)
        for number, reply in zip(again, sent, strict=True):
            replies[number] = reply


def _taken_row(job: NewJob, reply: Sequence[bytes]) -> int:
    """The row of a job that another request has, by the reply to its script."""
    return job.rows[int(reply[2]) - 1].row


def _check_sizes(jobs: Sequence[NewJob]) -> None:
    """Raises InvalidRequest for a request that no worker would read, whatever the limits."""
    for number, job in enumerate(jobs):
        if job.request_bytes > MAX_DATA:
            error = too_large("request_bytes", job.request_bytes, MAX_DATA)
            which = f"request {number}: " if len(jobs) > 1 else ""
            raise invalid(f"{which}{error.message}; nothing was enqueued")


def _refusal(redis: Redis, job: NewJob, reply: Any) -> JobError | None:
    """The error of a refused request, by the reply to its script. None: its job is in Redis."""
    if isinstance(reply, OutOfMemoryError):
        stored: Any = redis.hget(job_key(job.id), DATA)
        # The script may have run before Redis was full, and its reply was lost.
        return None if stored == job.data else redis_full(redis)
    if isinstance(reply, Damaged) and (damaged := damage_of(redis, reply, job.all_keys())):
        raise JobError("internal", f"the job can't be enqueued: {damaged[0]}")
    if isinstance(reply, Exception):
        raise reply
    if reply[0] == b"busy" or reply[0].startswith(b"session"):
        return refused(job.request.job.session or "", job.request.model, reply)
    if job.by_custom_id and reply[0] in (b"row", b"row_moved"):
        return custom_id_taken(job.run, job.request.job.custom_id or "", job.request.job.row)
    if reply[0] == b"producer":
        raise LeaseLost(job.run)
    if reply[0] == b"row":  # with the other reservation
        return row_taken(job.run, _taken_row(job, reply))
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
