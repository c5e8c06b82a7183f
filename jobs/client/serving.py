"""Which workers run, and the warning about a job for a model that none of them serves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable
from typing import Any

from redis import Redis, RedisError

from jobs import keys
from jobs.api.caller import warn_caller
from jobs.client.damage import Damage

CHECK_SECONDS = 5.0  # between two reads of the workers, by one client


class NobodyServes(UserWarning):
    """A job was submitted for a model that no running worker serves: it waits until one does."""


def nobody_serves(model: str, served: Iterable[str]) -> str:
    """The clause about a model that no running worker serves. `served`: models of the workers."""
    return (
        f"no worker serves {model!r} (models served now: {', '.join(sorted(served)) or 'none'}; "
        f"chatjobs work --model {model} starts one)"
    )


def read_workers(redis: Redis) -> list[dict[str, Any]]:
    """The status that each running worker publishes, by worker name. What no worker has written is
    left out."""
    return published(redis)[0]


def published(redis: Redis) -> tuple[list[dict[str, Any]], list[Damage]]:
    """The status of each running worker, by worker name, and the values that are none."""
    found: Any = redis.zrange(keys.WORKERS, 0, -1)
    running, damaged = [], []
    for name in sorted(found):
        if not _is_text(name):
            problem = f"has the member {name!r}, which is no name of a worker"
            damaged.append(Damage(keys.WORKERS, problem, "remove it (ZREM)"))
    names = worker_keys(found)
    values: Any = redis.mget(names) if names else []
    for name, value in zip(names, values, strict=True):
        status = _read_status(value) if value is not None else None
        if status is not None:
            running.append(status)
        elif value is not None:
            problem = "does not hold what a worker says about itself"
            damaged.append(Damage(name, problem, "delete it (DEL)"))
    return running, damaged


def served_models(redis: Redis) -> set[str]:
    """The names of the models that the running workers serve. Raises redis.RedisError."""
    return {name for worker in read_workers(redis) for name in worker["names"]}


def worker_keys(members: Iterable[bytes]) -> list[str]:
    """The keys of the workers that are members of keys.WORKERS, by name."""
    return [keys.worker(name.decode()) for name in sorted(members) if _is_text(name)]


def served_by(values: Iterable[bytes | None]) -> set[str]:
    """The models that the workers serve which have written these values."""
    found = [_read_status(value) for value in values if value is not None]
    return {name for status in found if status is not None for name in status["names"]}


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read_status(value: bytes) -> dict[str, Any] | None:
    """The status that a worker has published; None for any other value."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    match found:
        case {
            "name": str(),
            "host": str(),
            "device": str(),
            "paused": str(),
            "models": [*models],
            "names": [*names],
            "memory": {"weights": int() | float(), "cache": int() | float()},
            "running": int(),
            "tokens_per_second": int() | float(),
        } if all(isinstance(one, str) for one in (*models, *names)):
            status: dict[str, Any] = found
            counted = ("cached_tokens", "prompt_tokens", "clock_behind")
            counts = [status.get(name, 0) for name in counted]
            return status if all(isinstance(one, int) for one in counts) else None
    return None


class ServingCheck:
    """Warns about models that nobody serves, once per model in CHECK_SECONDS. May be shared by
    threads."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._next_read = 0.0
        self._served: set[str] = set()
        self._warned: set[str] = set()

    def warn(self, models: Iterable[str]) -> None:
        """Jobs of these models were enqueued."""
        with self._lock:
            try:
                self._read()
            except RedisError:  # the jobs are enqueued all the same
                return
            unserved = sorted(set(models) - self._served - self._warned)
            self._warned.update(unserved)
            served = self._served
        other = (
            "; chatjobs submit --model M submits to one that is served, the rows of a run with "
            "another --run"
            if served
            else ""
        )
        for model in unserved:
            message = f"{nobody_serves(model, served)}: its jobs wait until one does{other}"
            warn_caller(message, NobodyServes)

    def _read(self) -> None:
        now = time.monotonic()
        if now < self._next_read:
            return
        self._served = served_models(self._redis)
        self._warned = set()
        self._next_read = now + CHECK_SECONDS
