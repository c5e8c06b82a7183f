"""The plans of parts in Redis: which outbox entries form which file, and which recorder writes it.

The hash `keys.parts(run)` holds one plan per part in progress, by the part's name, and under
`cursor` the last outbox entry that a plan covers. Each script runs atomically.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from redis import Redis

from jobs import keys, lua
from jobs.results import outbox
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.damage import Damage, Damaged, Reports, damage_of

LOCK = lua.load("jobs.store", "recorder_lock")
PLAN = lua.load("jobs.store", "plan_part")
COMMIT = lua.load("jobs.store", "commit_part")
RELEASE = lua.load("jobs.store", "release_part")
LOOK_SECONDS_PER_RUN = 2e-4  # so that looking takes a few percent of Redis, however many runs

# KEYS and ARGV of the scripts, by name and in order.


class LockKeys(NamedTuple):
    lock: str
    outboxes: str


class LockArgs(NamedTuple):
    recorder: str
    milliseconds: int
    milliseconds_per_run: float


class PlanKeys(NamedTuple):
    outbox: str
    plans: str


class PlanArgs(NamedTuple):
    recorder: str
    hold_seconds: float
    max_rows: int
    max_bytes: int
    due_rows: int
    due_seconds: float
    oldest: str
    oldest_seconds: float
    till: str


class CommitKeys(NamedTuple):
    outbox: str
    plans: str
    outboxes: str
    wanted: str
    backlog: str


class CommitArgs(NamedTuple):
    name: str
    first: str
    last: str
    run: str


class ReleaseKeys(NamedTuple):
    plans: str


class ReleaseArgs(NamedTuple):
    name: str
    recorder: str


class RecorderLock(IntEnum):
    """The result of asking for the lock on the outboxes."""

    NO_OUTBOX = -1  # there is nothing to look at
    HELD = 0  # by a recorder that has looked, or looks
    ACQUIRED = 1


class Look(NamedTuple):
    """The condition of a part of a run: it is due from `rows` rows on, or when the oldest row is
    `seconds` old. `till`: id of the last entry that it may have."""

    run: str
    rows: int
    seconds: float
    till: str = "+"


@dataclass(frozen=True, slots=True)
class Plan:
    """The contents of one part: outbox entries `first` to `last` of a run, `count` of them."""

    run: str
    name: str
    first: str
    last: str
    count: int


def want_rows(run: str, deadline: float | None = None) -> Steps[None]:
    """Have the rows of a run written at once."""
    yield from retry(command("sadd", keys.WANTED, run), deadline)


class PartPlans:
    """The plans in one Redis, made in the name of one recorder."""

    def __init__(self, redis: Redis, recorder: str, hold_seconds: float) -> None:
        self._redis: Any = redis  # its stubs do not type replies as bytes
        self._recorder, self._hold_seconds = recorder, hold_seconds
        self._reports = Reports()
        # The oldest entry of each run that waits, and since when it has been seen (monotonic).
        self._oldest: dict[str, tuple[str, float]] = {}
        self._lock = redis.register_script(LOCK)
        self._plan = redis.register_script(PLAN)
        self._commit = redis.register_script(COMMIT)
        self._release = redis.register_script(RELEASE)

    def runs(self) -> list[str]:
        """The runs that have rows in their outbox."""
        return sorted(run.decode(errors="replace") for run in self._redis.smembers(keys.OUTBOXES))

    def wanted(self) -> set[str]:
        """The runs whose rows somebody waits for."""
        (found,) = self._read_each([keys.WANTED], "smembers")
        return {run.decode(errors="replace") for run in found}

    def last_entries(self) -> dict[str, str]:
        """The id of the last entry in the outbox of each run."""
        runs = self.runs()
        found = self._read_each([keys.outbox(run) for run in runs], "xrevrange", count=1)
        return {run: one[0][0].decode() for run, one in zip(runs, found, strict=True) if one}

    def any_open(self) -> bool:
        """True if a part of any run is in progress."""
        names = [keys.parts(run) for run in self.runs()]
        return any(set(found) - {b"cursor"} for found in self._read_each(names, "hkeys"))

    def _read_each(self, names: Sequence[str], command: str, **options: int) -> list[Any]:
        """The replies to a command about each key; an empty list for a key of another type."""
        pipeline = self._redis.pipeline(transaction=False)
        for name in names:
            getattr(pipeline, command)(name, **options)
        replies = pipeline.execute(raise_on_error=False) if names else []
        for name, reply in zip(names, replies, strict=True):
            damaged: list[Damage] = []
            if isinstance(reply, Damaged):
                damaged = damage_of(self._redis, reply, [name])
            elif isinstance(reply, Exception):
                raise reply
            self._reports.update(name, damaged)
        return [[] if isinstance(reply, Damaged) else reply for reply in replies]

    def acquire_lock(self, seconds: float) -> RecorderLock:
        """Try to get the lock to look at the outboxes, for `seconds`; for longer if there are many
        runs. Of all recorders, one looks in this time."""
        args = LockArgs(self._recorder, int(1000 * seconds), 1000 * LOOK_SECONDS_PER_RUN)
        return RecorderLock(self._lock(keys=LockKeys(keys.RECORDER, keys.OUTBOXES), args=args))

    def next(self, looks: Sequence[Look], *, max_rows: int, max_bytes: int) -> list[Plan]:
        """Plan the next part of each run that has one due, in one round trip. A plan whose recorder
        has left it comes first."""
        pipeline = self._redis.pipeline(transaction=False)
        now = time.monotonic()
        for run, rows, seconds, till in looks:
            oldest, since = self._oldest.get(run, ("", now))
            self._plan(
                keys=PlanKeys(outbox=keys.outbox(run), plans=keys.parts(run)),
                args=PlanArgs(
                    recorder=self._recorder,
                    hold_seconds=self._hold_seconds,
                    max_rows=max_rows,
                    max_bytes=max_bytes,
                    due_rows=rows,
                    due_seconds=seconds,
                    oldest=oldest,
                    oldest_seconds=now - since,
                    till=till,
                ),
                client=pipeline,
            )
        plans = []
        for look, reply in zip(looks, pipeline.execute(raise_on_error=False), strict=True):
            damaged, found = self._read(look.run, reply, now)
            self._reports.update(look.run, damaged)
            if found is not None:
                plans.append(found)
        return plans

    def _read(self, run: str, reply: Any, now: float) -> tuple[list[Damage], Plan | None]:
        """The plan of a run in the reply of plan.lua, and what another program has written. `now`:
        monotonic time of the look."""
        if isinstance(reply, Damaged):
            wrong = damage_of(self._redis, reply, [keys.outbox(run), keys.parts(run)])
            found = Damage(keys.parts(run), f"can't be used ({reply})", "look at its fields")
            return wrong or [found], None
        if isinstance(reply, Exception):
            raise reply
        fields, *plan = reply
        damaged = [
            Damage(
                keys.parts(run),
                f"has a field {name.decode(errors='replace')!r} that no worker has written: rows "
                "that it stands for are not written to Parquet",
                "remove the field (HDEL)",
            )
            for name in fields
        ]
        before = self._oldest.pop(run, None)
        if len(plan) == 1:
            oldest = plan[0].decode()
            self._oldest[run] = before if before and before[0] == oldest else (oldest, now)
        if len(plan) <= 1:
            return damaged, None
        name, first, last, count = plan
        return damaged, Plan(run, name.decode(), first.decode(), last.decode(), int(count))

    def rows(self, plan: Plan) -> Sequence[bytes | None]:
        """The rows of a plan that are still in the outbox; None for an entry without one."""
        entries = self._redis.xrange(keys.outbox(plan.run), plan.first, plan.last)
        return [fields.get(outbox.FIELD.encode()) for _, fields in entries]

    def is_open(self, plan: Plan) -> bool:
        """True if no recorder has committed the plan yet."""
        return bool(self._redis.hexists(keys.parts(plan.run), plan.name))

    def commit(self, plan: Plan) -> bool:
        """Delete a plan and its rows, which are in their file now. False if that was done."""
        return bool(
            self._commit(
                keys=CommitKeys(
                    outbox=keys.outbox(plan.run),
                    plans=keys.parts(plan.run),
                    outboxes=keys.OUTBOXES,
                    wanted=keys.WANTED,
                    backlog=keys.BACKLOG,
                ),
                args=CommitArgs(name=plan.name, first=plan.first, last=plan.last, run=plan.run),
            )
        )

    def release(self, plan: Plan) -> None:
        """Leave a plan to any other recorder."""
        self._release(
            keys=ReleaseKeys(plans=keys.parts(plan.run)),
            args=ReleaseArgs(name=plan.name, recorder=self._recorder),
        )
