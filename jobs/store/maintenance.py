"""Periodic maintenance: expires overdue jobs and records jobs that RQ's own tools ended.

Any worker may do it at any time, in small portions; each change is one script.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import redis
from redis import Redis
from redis.exceptions import OutOfMemoryError

from jobs import keys, lua
from jobs.errors import JobError
from jobs.store import rq_layout
from jobs.store.claimed_job import waited_too_long
from jobs.store.connection.protocol import Commands
from jobs.store.damage import Damage, Damaged, Reports, damage_of, wrong_types
from jobs.store.job_end import end_waiting, record_end
from jobs.store.job_state import JobState, Status, read_outcome, read_state
from jobs.store.preludes import DEPENDENTS_LUA, QUEUE_LUA, TURNS_LUA
from jobs.store.rq_layout import ATTEMPT, DEADLINE, DELAY, ROW, TTL
from jobs.store.turns import SESSION

RELEASE_TURN = lua.load("jobs.store", "release_turn", QUEUE_LUA, TURNS_LUA)
RELEASE_DEPENDENT = lua.load("jobs.store", "release_dependent", DEPENDENTS_LUA)
KEEP = lua.load("jobs.store", "keep")
NEARER = lua.load("jobs.store", "nearer")

PORTION = 200  # jobs per step and queue
AGAIN_MILLISECONDS = 60_000  # until a job that could not be ended is looked at again
ENDS: tuple[rq_layout.End, ...] = ("failed", "canceled")  # by RQ's tools
ENDED_FIELDS = ("status", ROW, ATTEMPT, "ended_at")


# KEYS and ARGV of the scripts, by name and in order.


class ReleaseTurnKeys(NamedTuple):
    job: str
    open: str


class ReleaseTurnArgs(NamedTuple):
    job_id: str
    name: str


class ReleaseDependentKeys(NamedTuple):
    job: str


class ReleaseDependentArgs(NamedTuple):
    job_id: str
    now: str


class KeepKeys(NamedTuple):
    queue: str


class KeepArgs(NamedTuple):
    first: int
    last: int


class NearerKeys(NamedTuple):
    times: str


class NearerArgs(NamedTuple):
    field: str
    units: int
    stored: str
    first: int
    last: int


class DeferredJobs:
    """The jobs in one Redis that wait for the turns before them in a session, or for other jobs, as
    RQ's own tools submit them.

    The script that ends a job queues the next ones; `release` is for those that it could not queue,
    or that another program has left behind.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._release_turn = redis.register_script(RELEASE_TURN)
        self._release_dependent = redis.register_script(RELEASE_DEPENDENT)

    def release(self, job: str, queue: str) -> None:
        """Queue a deferred job whose session is free or gone, or whose dependencies have ended.
        Raises Damaged for a key that another program has written."""
        key = rq_layout.job_key(job)
        names = [key, rq_layout.queue_key(queue)]
        try:
            session = self._redis.hget(key, SESSION)
            if session is None:
                args = ReleaseDependentArgs(job, rq_layout.format_time())
                self._release_dependent(keys=ReleaseDependentKeys(key), args=args)
                return
            name = session.decode(errors="replace")
            names += (keys.session(name), keys.turns(name), keys.open_turns(name))
            turn_keys = ReleaseTurnKeys(key, keys.open_turns(name))
            self._release_turn(keys=turn_keys, args=ReleaseTurnArgs(job, name))
        except Damaged as error:
            error.found = damage_of(self._redis, error, names)
            raise


class Maintenance:
    """Maintains `queues`, as they are at each step. `step` looks at one portion of each list."""

    def __init__(self, redis: Redis, queues: Collection[str]) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._queues = queues
        self._keep = redis.register_script(KEEP)
        self._nearer = redis.register_script(NEARER)
        self._deferred = DeferredJobs(redis)
        self._run = Commands(redis).run_steps
        self._reports = Reports()
        self._cursors: dict[str, int] = {}  # position of the next portion, by key

    def step(self) -> None:
        """End overdue jobs, write missing rows, keep queued hashes, queue jobs that wait for a
        session or for jobs although those are free, gone or ended, and see that none waits for a
        clock that was set back."""
        queues = tuple(self._queues)
        lists = [
            keys.DEADLINES,
            *map(rq_layout.scheduled_key, queues),
            *map(rq_layout.deferred_key, queues),
            *map(rq_layout.queue_key, queues),
            *(rq_layout.registry_key(queue, end) for queue in queues for end in ENDS),
        ]
        if not self._redis.exists(*lists):
            return
        self._apart(keys.DEADLINES, self._end_overdue)
        self._bring_nearer(keys.DEADLINES, TTL, 1000, DEADLINE)
        for queue in queues:
            self._bring_nearer(rq_layout.scheduled_key(queue), DELAY, 1, "")
            self._apart(rq_layout.queue_key(queue), partial(self._keep_queued, queue))
            self._apart(rq_layout.deferred_key(queue), partial(self._release, queue))
            for end in ENDS:
                key = rq_layout.registry_key(queue, end)
                self._apart(key, partial(self._record_ended, queue, end))

    def _apart(self, key: str, work: Callable[[], None]) -> bool:
        """Do the work that `key` belongs to. False, with a line in the log, if values
        of other programs in Redis prevent it."""
        try:
            work()
        except Exception as error:
            if isinstance(error, redis.RedisError) and not isinstance(error, Damaged):
                raise
            damaged = error.found if isinstance(error, Damaged) else []
            damaged = damaged or wrong_types(self._redis, [key])
            unreadable = Damage(key, f"belongs to what can't be read ({error})", "look at it")
            self._reports.update(key, damaged or [unreadable])
            return False
        self._reports.update(key, [])
        return True

    def _release(self, queue: str) -> None:
        """Queue jobs whose session is free or gone, or whose dependencies have ended."""
        for job in self._portion(rq_layout.deferred_key(queue), self._redis.zrange):
            name = job.decode(errors="replace")
            self._apart(rq_layout.job_key(name), partial(self._deferred.release, name, queue))

    def _end_overdue(self) -> None:
        """Fail the jobs whose time to live has passed while they wait."""
        seconds, microseconds = self._redis.time()
        now = seconds * 1000 + microseconds // 1000
        for name in self._redis.zrangebyscore(keys.DEADLINES, "-inf", now, 0, PORTION):
            job = name.decode(errors="replace")
            if not self._apart(rq_layout.job_key(job), partial(self._end_one, job, name)):
                later = {name: now + AGAIN_MILLISECONDS}  # so that others have their turn
                with suppress(OutOfMemoryError):  # while Redis is full, it is looked at each time
                    self._redis.zadd(keys.DEADLINES, later, xx=True)

    def _end_one(self, job: str, name: bytes) -> None:
        state = self._run(read_state(job, full=True))
        options = state.request.get("job")
        ttl = options.get("ttl") if isinstance(options, dict) else None
        if state.status in (Status.DEFERRED, Status.SCHEDULED, Status.QUEUED):
            self._run(end_waiting(state, waited_too_long(ttl), "failed"))
        else:  # its worker watches the deadline of a running job
            self._redis.zrem(keys.DEADLINES, name)

    def _bring_nearer(self, key: str, field: str, units: int, stored: str) -> None:
        """See that no job of a sorted set of times waits for longer than it was meant to. One
        portion at each step; all that follow at once if the clock was set back."""

        def look() -> None:
            count, moved = PORTION, 1
            while count == PORTION and moved:
                first = self._cursors.get(key, 0)
                args = NearerArgs(field, units, stored, first, first + PORTION - 1)
                count, moved = self._nearer(keys=NearerKeys(key), args=args)
                self._cursors[key] = first + PORTION if count == PORTION else 0

        self._apart(key, look)

    def _keep_queued(self, queue: str) -> None:
        """Remove the expiry that `rq requeue` leaves on the hash of a job."""
        key = rq_layout.queue_key(queue)
        first = self._cursors.get(key, 0)
        count = self._keep(keys=KeepKeys(key), args=KeepArgs(first, first + PORTION - 1))
        self._cursors[key] = first + PORTION if count == PORTION else 0

    def _record_ended(self, queue: str, end: rq_layout.End) -> None:
        """Write the rows of jobs that RQ's tools or stock workers have ended."""
        ids = self._portion(rq_layout.registry_key(queue, end), self._redis.zrange)
        pipeline = self._redis.pipeline(transaction=False)
        for job in ids:
            pipeline.hmget(rq_layout.job_key(job.decode(errors="replace")), *ENDED_FIELDS)
        replies = pipeline.execute(raise_on_error=False) if ids else []
        for job, reply in zip(ids, replies, strict=True):
            if isinstance(reply, Exception):
                continue  # the key is not a hash
            status, recorded, attempt, ended_at = reply
            if status == end.encode() and recorded != (attempt or b"0"):
                name = job.decode(errors="replace")
                work = partial(self._record_one, name, queue, end, rq_layout.parse_time(ended_at))
                self._apart(rq_layout.job_key(name), work)

    def _record_one(self, job: str, queue: str, end: rq_layout.End, ended_at: float | None) -> None:
        state = replace(self._run(read_state(job, full=True)), queue=queue)
        self._run(record_end(state, self._error_of(state, end), end, ended_at))

    def _error_of(self, state: JobState, end: rq_layout.End) -> JobError:
        if end == "canceled":
            return JobError("cancelled", f"job {state.id} was cancelled with RQ's own tools")
        try:
            self._run(read_outcome(state))
        except JobError as error:
            return error
        return JobError("internal", f"job {state.id} failed without a reason")

    def _portion(self, key: str, read: Any) -> list[bytes]:
        """The next ids of a list or sorted set, from its start after its end."""
        start = self._cursors.get(key, 0)
        ids: list[bytes] = read(key, start, start + PORTION - 1)
        self._cursors[key] = start + PORTION if len(ids) == PORTION else 0
        return ids
