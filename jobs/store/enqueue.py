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
DIGEST_BYTES = 8  # of a request with a row, as in reservations.lua, and of a custom_id

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
    rows: str
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
    row: str
    digest: bytes
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


class NewJob(NamedTuple):
    id: str
    request: Request
    run: str
    request_bytes: int
    message_bytes: int
    data: bytes
    digest: bytes  # of the content, of a request with a row
    by_custom_id: bool = False  # custom_id identifies the row
    holder: str = ""  # token of the lease on the run that the caller must hold; "": none

    def script_keys(self, abandoned: bytes = b"") -> EnqueueKeys:
        options = self.request.job
        rows = keys.rows(self.run, options.row or 0)
        ids, next_row = rows, rows
        if self.by_custom_id:
            ids = keys.custom_ids(self.run, options.custom_id or "")
            next_row = keys.next_row(self.run)
        return _keys_of(self.request.model, options.priority)._replace(
            job=job_key(self.id),
            log=keys.log(self.id),
            results=results_key(self.id),
            rows=rows,
            abandoned_job=job_key(self.job_of(abandoned) if abandoned else self.id),
            ids=ids,
            next_row=next_row,
            producer=keys.producer(self.run) if self.holder else rows,
        )

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

    def job_of(self, reservation: bytes) -> str:
        """The id of the job that has a reservation of this row, unless its request chose an id."""
        return _row_job(self.run, self.request.job.row or 0, reservation[:DIGEST_BYTES])

    def script_args(self, now: str, result_ttl: int | None, abandoned: bytes = b"") -> list[Any]:
        """The named arguments, then field, value, … of the hash. `abandoned`: the reservation of
        another request that this one replaces."""
        model, options = self.request.model, self.request.job
        named = EnqueueArgs(
            job_id=self.id,
            model=model,
            data=self.data,
            request_bytes=self.request_bytes,
            message_bytes=self.message_bytes,
            row="" if options.row is None else keys.row_field(options.row, options.repeat),
            digest=self.digest,
            custom_id=custom_id_digest(options.custom_id or "") if self.by_custom_id else b"",
            row_number=(options.row or 0) if self.by_custom_id else "",
            row_seconds=ROW_SECONDS,
            abandoned=abandoned,
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
        rows="",
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


def is_unwritten(reservation: bytes) -> bool:
    """True if the row of a reservation is still to be written."""
    return len(reservation) > DIGEST_BYTES


def new_job(request: Request, *, by_custom_id: bool = False, holder: str = "") -> NewJob:
    """`by_custom_id`: custom_id identifies the row of a request that has one. `holder`: see
    `enqueue`."""
    content = request.to_dict()
    run, row, job_id = run_of(content), request.job.row, request.job.id
    keyed = by_custom_id and is_keyed(request)
    # All of it becomes JSON once: the sizes and the digest come from the text of the job.
    messages = [_to_json(message) for message in content.pop("messages", ())]
    content["job"] = content.pop("job")  # last, so that the id can be appended
    content["job"].pop("id", None)
    first = f'"messages":[{",".join(messages)}],' if messages else ""
    text = f"{{{first}{_to_json(content)[1:]}"
    digest = b""
    if row is not None:
        content_text = (text + (job_id or "")).encode()
        digest = hashlib.blake2b(content_text, digest_size=DIGEST_BYTES).digest()
        job_id = job_id or _row_job(run, row, digest)
    job_id = job_id or _new_id()
    comma = "," if content["job"] else ""
    text = f'{text[:-2]}{comma}"id":"{job_id}"}}}}'
    call, data = encode_call(operation_for(request).func, "request", text)
    longest = max(map(len, messages), default=0)
    return NewJob(job_id, request, run, len(call), longest, data, digest, keyed, holder)


def _row_job(run: str, row: int, digest: bytes) -> str:
    """The id of the job of a row, from the digest of its request."""
    return hashlib.blake2b(f"{run}/{row}/".encode() + digest, digest_size=16).hexdigest()


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
