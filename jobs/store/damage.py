"""Detects Redis keys of an unexpected type or format and names the remedy.

Other programs share the server. A value that cannot be read is reported, and affects what it
belongs to alone: one job, one run, one queue, one worker.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import redis

from jobs import keys
from jobs.store import rq_layout

logger = logging.getLogger(__name__)

# The type of each key. A pattern matches the whole key; RQ's keys are those that chatjobs changes.
_TYPES = (
    (r"chatjobs:(workers|recorders|deadlines|tenants:.*|started:.*|responses:.*)", "zset"),
    (r"chatjobs:(outboxes|stopping|wanted|tenant-running:.*)", "set"),
    (r"chatjobs:(limits|open-bytes|tenant-jobs|backlog|rows:.*|parts:.*|\{.*\}:session)", "hash"),
    (r"chatjobs:(custom-ids:.*|\{.*\}:response)", "hash"),
    (r"chatjobs:(tenant:.*|quarantine:.*|wake(?:-worker)?:.*|\{.*\}:(turns|open))", "list"),
    (r"chatjobs:answers:.*", "list"),
    (r"chatjobs:(outbox:.*|\{.*\}:log)", "stream"),
    (r"chatjobs:(reaper|recorder|results|id|next-row:.*|producer:.*)", "string"),
    (r"chatjobs:tokenizer:.*", "string"),
    (r"chatjobs:(upkeep:.*|worker:.*|recorder:.*|loading:.*|quarantine-worker:.*)", "string"),
    (r"rq:(wip|scheduled|deferred|finished|failed|canceled|executions):.*", "zset"),
    (r"rq:results:.*", "stream"),
    (r"rq:(queues|workers)", "set"),
    (r"rq:queue:.*", "list"),
    (r"rq:job:.*:(dependents|dependencies)", "set"),
    (r"rq:(job|worker):.*", "hash"),
)  # fmt: skip
_SHARED = (
    keys.WORKERS,
    keys.STOPPING,
    keys.REAPER,
    keys.RECORDER,
    keys.RECORDERS,
    keys.BACKLOG,
    keys.OUTBOXES,
    keys.WANTED,
    keys.RESULTS,
    keys.ID,
    keys.LIMITS,
    keys.OPEN_BYTES,
    keys.TENANT_JOBS,
    keys.DEADLINES,
    rq_layout.QUEUES_KEY,
)
_OF_QUEUE: tuple[Callable[[str], str], ...] = (
    rq_layout.queue_key,
    rq_layout.wip_key,
    rq_layout.scheduled_key,
    rq_layout.deferred_key,
    partial(rq_layout.registry_key, end="failed"),
    partial(rq_layout.registry_key, end="finished"),
    partial(rq_layout.registry_key, end="canceled"),
    keys.tenants,
    keys.quarantine,
    keys.quarantine_worker,
)
_NAMES = {"zset": "sorted set"}


class Damage(NamedTuple):
    """A value that cannot be read."""

    key: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"the key {self.key} in Redis {self.problem}: {self.remedy}"


class Damaged(redis.ResponseError):
    """A command or a script failed because of the values in its keys. Errors of the connection, the
    memory, the role and the permissions have classes of their own.

    found: the key, if a script has named it, see `check_type` in queue.lua; else nothing.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        named = re.search(r"WRONGTYPE (.+?) is a (\w+), not a \w+", message)
        self.found = [wrong_type(named[1], named[2])] if named else []


class Unwritable(redis.ResponseError):
    """Redis takes no writes for now: it can't save its data, as on a full disk (MISCONF), or too
    few replicas are connected (NOREPLICAS)."""


class Busy(redis.ConnectionError):
    """Redis runs a script of another program for so long that it refuses all other commands (BUSY).
    It is as good as away: whoever waits through an outage waits through this."""


class Reports:
    """Logs each damaged value once, until it is gone or has changed."""

    def __init__(self) -> None:
        self._reported: dict[str, set[Damage]] = {}

    def update(self, place: str, found: list[Damage]) -> None:
        """The damaged values that were found at a place now."""
        before = self._reported.pop(place, set())
        for one in found:
            if one not in before:
                logger.error("%s", one)
        if found:
            self._reported[place] = set(found)


def classified(error: Exception) -> Exception:
    """An error in a reply of Redis: Damaged if it is about values, Unwritable if Redis refuses all
    writes, Busy if it refuses all commands. The only place that decides so: connections pass all
    errors through it as they parse a reply, also those inside the reply of a script or a
    transaction."""
    if type(error) is not redis.ResponseError:
        return error
    if str(error).startswith("BUSY "):  # not BUSYGROUP or BUSYKEY
        return Busy(str(error))
    refuses_writes = str(error).startswith(("MISCONF", "NOREPLICAS"))
    return Unwritable(str(error)) if refuses_writes else Damaged(str(error))


def readable(pipeline: Any, unreadable: Any = None) -> list[Any]:
    """The replies to the commands of a pipeline; `unreadable` for a key of another type."""
    replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception) and not isinstance(reply, Damaged):
            raise reply
    return [unreadable if isinstance(reply, Damaged) else reply for reply in replies]


def damage_of(client: redis.Redis, error: Damaged, names: Iterable[str]) -> list[Damage]:
    """The keys that made a command fail: the one that a script has named, or those of another type
    among `names`. Raises redis.RedisError."""
    return error.found or wrong_types(client, names)


def causes(client: redis.Redis, error: Damaged, queues: Iterable[str]) -> list[Damage]:
    """`damage_of` for an error whose keys are not known: all shared keys are looked at. `queues`:
    as in `find_damage`. Raises redis.RedisError."""
    with suppress(ValueError):  # of names that are no text
        return error.found or find_damage(client, queues)
    return []


def type_of(key: str) -> str | None:
    """The type that a key of chatjobs or RQ has in Redis; None if it has none, or is not known."""
    return next((kind for pattern, kind in _TYPES if re.fullmatch(pattern, key)), None)


def wrong_types(client: redis.Redis, names: Iterable[str]) -> list[Damage]:
    """The keys that have another type than chatjobs gives them."""
    names = list(dict.fromkeys(names))
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.type(name)
    found: Any = pipeline.execute() if names else []
    return typed_wrongly(dict(zip(names, found, strict=True)))


def typed_wrongly(kinds: Mapping[str, bytes]) -> list[Damage]:
    """The keys of another type, by the replies to TYPE."""
    return [
        wrong_type(name, kind.decode())
        for name, kind in kinds.items()
        if kind != b"none" and kind.decode() != (type_of(name) or kind.decode())
    ]


def wrong_type(key: str, found: str) -> Damage:
    """The damage of a key that has another type, by its name in Redis."""
    wanted = type_of(key) or ""
    kind, other = (_NAMES.get(one, one) for one in (found, wanted))
    return Damage(
        key,
        f"is a {kind} instead of a {other}, because another program has written it",
        f"rename it (redis-cli RENAME '{key}' 'damaged:{key}'), and chatjobs goes on",
    )


def find_damage(client: redis.Redis, queues: Iterable[str] = ()) -> list[Damage]:
    """The keys of another type among those that all jobs share, and those of all queues, runs and
    workers. `queues`: further ones, which may have had no job yet."""
    damaged = wrong_types(client, _SHARED)
    return damaged + wrong_types(client, _of_parts(client, {one.key for one in damaged}, queues))


def _of_parts(client: redis.Redis, damaged: set[str], queues: Iterable[str]) -> Iterator[str]:
    known = [] if rq_layout.QUEUES_KEY in damaged else rq_layout.queue_names(client)
    for queue in [*known, *queues]:
        if keys.is_queue(queue):
            yield from (key(queue) for key in _OF_QUEUE)
            yield keys.wake(queue)
            yield from _of_tenants(client, queue)
    readers: Any = (
        (keys.OUTBOXES, client.smembers, (keys.outbox, keys.parts)),
        (keys.WORKERS, lambda key: client.zrange(key, 0, -1), (keys.started, keys.worker)),
        (keys.RECORDERS, lambda key: client.zrange(key, 0, -1), (keys.recorder,)),
    )
    for key, read, of_part in readers:
        for name in () if key in damaged else read(key):
            yield from (one(name.decode(errors="replace")) for one in of_part)


def _of_tenants(client: redis.Redis, queue: str) -> Iterator[str]:
    """The keys of the tenants that have jobs in a queue."""
    try:
        tenants: Any = client.zrange(keys.tenants(queue), 0, -1)
    except Damaged:  # the key itself is reported
        return
    for tenant in tenants:
        if tenant:  # RQ's own list has the name ''
            name = tenant.decode(errors="replace")
            yield from (keys.tenant_queue(queue, name), keys.tenant_running(name))
