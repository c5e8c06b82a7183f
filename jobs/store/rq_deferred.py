"""Deferred jobs: they wait for the turns before them in a session, or for other jobs, as RQ's own
tools submit them.

The script that ends a job queues the next ones. The upkeep calls this for those that it could not
queue, or that another program has left behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import redis
from redis import Redis

from jobs import keys, lua
from jobs.store import rq_format
from jobs.store.damage import Damaged, is_damage, named, wrong_types
from jobs.store.rq_format import DEPENDENTS_LUA, TENANTS_LUA
from jobs.store.turns import SESSION, TURNS_LUA

RELEASE_TURN = lua.load("jobs.store", "release_turn", TENANTS_LUA, TURNS_LUA)
RELEASE_DEPENDENT = lua.load("jobs.store", "release_dependent", DEPENDENTS_LUA)


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


class RQDeferred:
    """The deferred jobs in one Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis: Any = redis  # its stubs leave open whether replies are bytes
        self._release_turn = redis.register_script(RELEASE_TURN)
        self._release_dependent = redis.register_script(RELEASE_DEPENDENT)

    def release(self, job: str, queue: str) -> None:
        """Queue a deferred job whose session is free or gone, or whose dependencies have ended.
        Raises Damaged for a key that another program has written."""
        key = rq_format.job_key(job)
        names = [key, rq_format.queue_key(queue)]
        try:
            session = self._redis.hget(key, SESSION)
            if session is None:
                args = ReleaseDependentArgs(job, rq_format.format_time())
                self._release_dependent(keys=ReleaseDependentKeys(key), args=args)
                return
            name = session.decode(errors="replace")
            names += (keys.session(name), keys.turns(name), keys.open_turns(name))
            turn_keys = ReleaseTurnKeys(key, keys.open_turns(name))
            self._release_turn(keys=turn_keys, args=ReleaseTurnArgs(job, name))
        except redis.ResponseError as error:
            by_script = named(error)
            if by_script is not None:
                raise Damaged([by_script]) from None
            if is_damage(error) and (found := wrong_types(self._redis, names)):
                raise Damaged(found) from None
            raise
