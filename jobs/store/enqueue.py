"""Enqueueing: checked requests become RQ jobs in the queues of their models.

A job is a plain RQ job with the JSON serializer, so RQ's own tools show it. RQ's job timeout is
off: the worker enforces time limits.
"""

from __future__ import annotations

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
from jobs.operations import Request, parse_request
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
from jobs.store.new_job import NewJob, custom_id_digest, new_job
from jobs.store.preludes import QUEUE_LUA, RESERVATIONS_LUA, TURNS_LUA
from jobs.store.producer_lease import LeaseLost
from jobs.store.reservations import RowHashes, is_unwritten, job_of
from jobs.store.rq_layout import (
    DATA,
    MAX_DATA,
    QUEUES_KEY,
    TENANT,
    deferred_key,
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
# In one call of the script, which blocks Redis for about a millisecond:
SCRIPT_JOBS = 32  # each wakes a worker, and a wake list keeps as many elements
SCRIPT_ROWS = 2000
SCRIPT_BYTES = 2**20  # of data, unless one job has more
RESULT_TTLS = {"interactive": RESULT_SECONDS, "bulk": BULK_RESULT_SECONDS}

ENQUEUE = lua.load("jobs.store", "enqueue", QUEUE_LUA, TURNS_LUA, RESERVATIONS_LUA)


# KEYS and ARGV of enqueue.lua, by name and in order.


class EnqueueKeys(NamedTuple):
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
    open_bytes: str
    limits: str
    deadlines: str
    producer: str


class JobKeys(NamedTuple):
    job: str
    log: str
    results: str
    abandoned_job: str
    ids: str
    next_row: str


class EnqueueArgs(NamedTuple):
    jobs: int
    model: str
    row_seconds: int
    max_jobs: int
    max_bytes: int
    max_request_bytes: int
    max_message_bytes: int
    max_session_bytes: int
    holder: str


class JobArgs(NamedTuple):
    job_id: str
    data: bytes
    request_bytes: int
    message_bytes: int
    cost: int
    fields: str
    digests: bytes
    named_job: str
    custom_id: bytes
    row_number: int | str
    abandoned: bytes
    at: int | str
    delay: int | str
    ttl: int | str
    session: str
    session_waits: int


class Abandoned(NamedTuple):
    """The reservation of a row by another request, to be replaced if its job is gone."""

    reservation: bytes
    job: str


class Shared(NamedTuple):
    """What all jobs of one call of the script have. title: of the operation. keep: seconds that
    Redis keeps a result. run: whose lease the caller must hold, with the token `holder`; "": of
    none."""

    model: str
    priority: str
    title: str
    keep: int
    tenant: str | None
    run: str
    holder: str


@lru_cache(maxsize=64)
def _shared_keys(model: str, priority: str, run: str) -> EnqueueKeys:
    other = "interactive" if priority == "bulk" else "bulk"
    queue, other_queue = keys.queue(model, priority), keys.queue(model, other)
    return EnqueueKeys(
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
        open_bytes=keys.OPEN_BYTES,
        limits=keys.LIMITS,
        deadlines=keys.DEADLINES,
        producer=keys.producer(run) if run else queue_key(queue),
    )


def _job_keys(job: NewJob, abandoned: Abandoned | None) -> JobKeys:
    name = job_key(job.id)
    ids, next_row = name, name
    if job.by_custom_id:
        ids = keys.custom_ids(job.run, job.request.job.custom_id or "")
        next_row = keys.next_row(job.run)
    return JobKeys(
        job=name,
        log=keys.log(job.id),
        results=results_key(job.id),
        abandoned_job=name if abandoned is None else job_key(abandoned.job),
        ids=ids,
        next_row=next_row,
    )


def _job_args(job: NewJob, fields: str, abandoned: Abandoned | None) -> JobArgs:
    """`fields`: its rows."""
    options = job.request.job
    return JobArgs(
        job_id=job.id,
        data=job.data,
        request_bytes=job.request_bytes,
        message_bytes=job.message_bytes,
        cost=job.operation.cost(job.request),
        fields=fields,
        digests=b"".join([one.digest for one in job.rows]),
        named_job=job.id if job.request.job.id or isinstance(job.request, ScoreRequest) else "",
        custom_id=custom_id_digest(options.custom_id or "") if job.by_custom_id else b"",
        row_number=(options.row or 0) if job.by_custom_id else "",
        abandoned=b"" if abandoned is None else abandoned.reservation,
        at="" if options.at is None else round(1000 * options.at.timestamp()),
        delay="" if options.delay is None else round(1000 * options.delay),
        ttl="" if options.ttl is None else max(1, round(1000 * options.ttl)),
        session=options.session or "",
        session_waits=int(options.turn is not None and options.turn.wait),
    )


def _shared(job: NewJob, result_ttl: int | None, holder: str) -> Shared:
    options = job.request.job
    return Shared(
        model=job.request.model,
        priority=options.priority,
        title=job.operation.title,
        keep=options.result_ttl or result_ttl or RESULT_TTLS[options.priority],
        tenant=options.tenant,
        run=job.run if holder else "",
        holder=holder,
    )


class ToSend(NamedTuple):
    """A new job, and what is beside it in a call of the script. abandoned: the reservation that it
    replaces."""

    job: NewJob
    shared: Shared
    abandoned: Abandoned | None = None


class _Call:
    """One call of the script, for some jobs that share their queue."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._hashes = RowHashes()
        self._keys: list[str] = []  # of each job
        self._args: list[Any] = []
        self._count = self._bytes = self._rows = 0

    def takes(self, one: ToSend) -> bool:
        """True if a job can be added. The first one always can."""
        return (
            one.shared == self.shared
            and self._count < SCRIPT_JOBS
            and self._bytes + len(one.job.data) <= SCRIPT_BYTES
            and self._rows + len(one.job.rows) <= SCRIPT_ROWS
        )

    def add(self, one: ToSend) -> None:
        job, _, abandoned = one
        fields = self._hashes.fields(job.run, [(new.row, new.repeat) for new in job.rows])
        self._keys += _job_keys(job, abandoned)
        self._args += _job_args(job, fields, abandoned)
        self._count += 1
        self._bytes += len(job.data)
        self._rows += len(job.rows)

    def all_keys(self) -> list[str]:
        """EnqueueKeys, the JobKeys of each job, and the hashes of the rows."""
        names = _shared_keys(self.shared.model, self.shared.priority, self.shared.run)
        return [*names, *self._keys, *self._hashes.names]

    def command(self, script: str, now: str) -> list[Any]:
        """The words of EVALSHA. `script`: its digest."""
        shared, names = self.shared, self.all_keys()
        args = EnqueueArgs(
            jobs=self._count,
            model=shared.model,
            row_seconds=ROW_SECONDS,
            max_jobs=DEFAULTS.jobs,
            max_bytes=DEFAULTS.bytes,
            max_request_bytes=DEFAULTS.request_bytes,
            max_message_bytes=DEFAULTS.message_bytes,
            max_session_bytes=DEFAULTS.session_bytes,
            holder=shared.holder,
        )
        fields = queued_fields(
            now=now,
            queue=keys.queue(shared.model, shared.priority),
            description=f"{shared.title} with {shared.model[:100]}",  # RQ's has the prompt
            result_ttl=shared.keep,
            failure_ttl=FAILURE_SECONDS,
        )
        tenant = () if shared.tenant is None else (TENANT, shared.tenant)
        all_args = [*args, *self._args, *chain.from_iterable(fields.items()), *tenant]
        return ["EVALSHA", script, len(names), *names, *all_args]

    def replies(self, reply: Any) -> list[Any]:
        """The reply for each job. An error of the whole script is that of each."""
        return [reply] * self._count if isinstance(reply, Exception) else reply


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
    alone = isinstance(requests, Sequence) and len(requests) == 1 and not first
    for number, request in enumerate(requests, first):
        try:
            parsed.append(parse_request(request))
        except InvalidRequest as error:
            which = "" if alone else f"request {number}: "
            raise invalid(f"{which}{error.message}", error.param) from None
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
    jobs = [new_job(one, by_custom_id=by_custom_id) for one in requests]
    _check_sizes(jobs)
    to_send = [ToSend(job, _shared(job, result_ttl, holder)) for job in jobs]
    found: list[Enqueued | JobError] = []
    for start in range(0, len(to_send), BATCH):
        batch = to_send[start : start + BATCH]
        replies = _send(redis, batch)
        _replace_abandoned(redis, batch, replies)
        for one, reply in zip(batch, replies, strict=True):
            enqueued = Enqueued(one.job.id, reply == [b"same"], reply == [b"ended"])
            found.append(_refusal(redis, one, reply) or enqueued)
    return found


def _send(redis: Redis, jobs: Iterable[ToSend]) -> list[Any]:
    """The replies for some jobs, in one round trip. If the connection breaks, all calls are sent
    again: those that Redis has run reply that the jobs are there."""
    calls: list[_Call] = []
    for one in jobs:
        if not calls or not calls[-1].takes(one):
            calls.append(_Call(one.shared))
        calls[-1].add(one)
    script = redis.register_script(ENQUEUE)
    pipeline: Any = redis.pipeline(transaction=False)  # its stubs lack `scripts`
    pipeline.scripts.add(script)
    now = format_time()
    for call in calls:
        pipeline.execute_command(*call.command(script.sha, now))
    replies = pipeline.execute(raise_on_error=False)
    return [*chain.from_iterable(map(_Call.replies, calls, replies))]


def _replace_abandoned(redis: Redis, jobs: Sequence[ToSend], replies: list[Any]) -> None:
    """Send again what was refused for the reservation of another request, if the job of that has
    left Redis without a row, as after `rq empty`: nobody would ever write the row."""
    held: dict[int, Abandoned] = {}
    for number, reply in enumerate(replies):
        if isinstance(reply, list) and reply[0] == b"row" and is_unwritten(reply[1]):
            job = jobs[number].job
            held[number] = Abandoned(reply[1], job_of(reply[1], job.run, _taken_row(job, reply)))
    if not held:
        return
    pipeline = redis.pipeline(transaction=False)
    for other in held.values():
        pipeline.exists(job_key(other.job))
    exists = dict(zip(held, pipeline.execute(), strict=True))
    again = [number for number in held if not exists[number]]
    if again:
        sent = _send(redis, [jobs[number]._replace(abandoned=held[number]) for number in again])
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


def _all_keys(one: ToSend) -> list[str]:
    """Every key that the script reads or writes for a job."""
    call = _Call(one.shared)
    call.add(one)
    options = one.job.request.job
    queue = keys.queue(one.shared.model, one.shared.priority)
    names = [*call.all_keys(), keys.TENANT_JOBS]
    if options.tenant is not None:
        names += (keys.tenants(queue), keys.tenant_queue(queue, options.tenant))
    if options.session is not None:
        session = options.session
        names += (keys.session(session), keys.turns(session), keys.open_turns(session))
    return names


def _refusal(redis: Redis, one: ToSend, reply: Any) -> JobError | None:
    """The error of a refused request, by the script's reply for it. None: its job is in Redis."""
    job = one.job
    if isinstance(reply, OutOfMemoryError):
        stored: Any = redis.hget(job_key(job.id), DATA)
        # The script may have run before Redis was full, and its reply was lost.
        return None if stored == job.data else redis_full(redis)
    if isinstance(reply, Damaged) and (damaged := damage_of(redis, reply, _all_keys(one))):
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
