"""The workers that run or load their models, and the warning about a job for a model that none of
them serves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from redis import Redis, RedisError

from jobs import keys
from jobs.api.caller import warn_caller
from jobs.operations import CHAT
from jobs.store.damage import Damage

CHECK_SECONDS = 5.0  # between two reads of the workers, by one client


class NobodyServes(UserWarning):
    """A job was submitted for a model that no running worker serves: it waits until one does."""


class Published(NamedTuple):
    """The statuses that workers publish, by worker name."""

    running: list[dict[str, Any]]
    loading: list[dict[str, Any]]  # those that serve nothing yet, since they load their models
    damaged: list[Damage]  # what no worker has written

    @property
    def served(self) -> set[str]:
        """The names of the models that the running workers serve."""
        return {name for worker in self.running for name in worker["names"]}

    def serve(self, queue: str) -> int:
        """Number of running workers that take the jobs of an RQ queue."""
        model, func = keys.model_of(queue), keys.func_of(queue) or CHAT.func
        return sum(model in one["names"] and func in _funcs(one) for one in self.running)


def nobody_takes(queue: str, workers: Published) -> str:
    """The clause about an RQ queue whose jobs no running worker takes."""
    model, func = keys.model_of(queue), keys.func_of(queue)
    if func is None:
        return nobody_serves(model, workers)
    run = ", ".join(sorted({one for worker in workers.running for one in _funcs(worker)}))
    return (
        f"no worker runs {func} for {model!r} (functions run now: {run or 'none'}; start a worker "
        "of a version of chatjobs that does, or end the jobs with chatjobs jobs cancel)"
    )


def nobody_serves(model: str, workers: Published) -> str:
    """The clause about a model that no running worker serves."""
    if loader := who_loads(model, workers.loading):
        return f"no worker serves {model!r} yet ({loader})"
    served = ", ".join(sorted(workers.served)) or "none"
    return (
        f"no worker serves {model!r} (models served now: {served}; chatjobs work --model {model} "
        "starts one)"
    )


def read_workers(redis: Redis) -> list[dict[str, Any]]:
    """The status that each running worker publishes, by worker name. What no worker has written is
    left out."""
    return published(redis).running


def published(redis: Redis) -> Published:
    """The status of each worker, and the values that are none."""
    found: Any = redis.zrange(keys.WORKERS, 0, -1)
    running: list[dict[str, Any]] = []
    loading: list[dict[str, Any]] = []
    damaged: list[Damage] = []
    for name in sorted(found):
        if not _is_text(name):
            problem = f"has the member {name!r}, which is no name of a worker"
            damaged.append(Damage(keys.WORKERS, problem, "remove it (ZREM)"))
    names = worker_keys(found)
    values: Any = redis.mget(names) if names else []
    for name, value in zip(names, values, strict=True):
        status = _read_status(value) if value is not None else None
        if status is not None:
            (loading if _loads(status) else running).append(status)
        elif value is not None:
            problem = "does not hold what a worker says about itself"
            damaged.append(Damage(name, problem, "delete it (DEL)"))
    return Published(running, loading, damaged)


def _funcs(worker: Mapping[str, Any]) -> list[str]:
    """The functions whose jobs a worker runs; those of older versions do not say it."""
    funcs: list[str] = worker.get("funcs", [CHAT.func])
    return funcs


def who_loads(model: str, loading: Iterable[Mapping[str, Any]]) -> str:
    """A clause about the workers that load a model; "" if none does."""
    names = [
        worker["name"]
        for worker in loading
        if any(model in possible for possible in worker["loading"].values())
    ]
    if len(names) > 1:
        return f"workers {', '.join(names[:-1])} and {names[-1]} are loading it"
    return f"worker {names[0]} is loading it" if names else ""


def worker_keys(members: Iterable[bytes]) -> list[str]:
    """The keys of the workers that are members of keys.WORKERS, by name."""
    return [keys.worker(name.decode()) for name in sorted(members) if _is_text(name)]


def read_values(values: Iterable[bytes | None]) -> Published:
    """The statuses in these values, without damage."""
    found = [_read_status(value) for value in values if value is not None]
    known = [status for status in found if status is not None]
    loading = [status for status in known if _loads(status)]
    return Published([status for status in known if not _loads(status)], loading, [])


def _loads(status: Mapping[str, Any]) -> bool:
    """True if a worker still loads its models; those of older versions do not say it."""
    return bool(status.get("loading"))


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
            readable = all(isinstance(one, int) for one in counts) and _are_texts(
                status.get("funcs", [])
            )
            return status if readable and _is_loading(status.get("loading", {})) else None
    return None


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_loading(value: Any) -> bool:
    """True if a value holds the possible names of models, by their references."""
    return isinstance(value, dict) and all(map(_are_texts, value.values()))


class ServingCheck:
    """Warns about models that nobody serves, once per model in CHECK_SECONDS. May be shared by
    threads."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._lock = threading.Lock()
        self._next_read = 0.0
        self._workers = Published([], [], [])
        self._warned: set[str] = set()

    def warn(self, models: Iterable[str]) -> None:
        """Jobs of these models were enqueued."""
        with self._lock:
            try:
                self._read()
            except RedisError:  # the jobs are enqueued all the same
                return
            workers = self._workers
            unserved = sorted(set(models) - workers.served - self._warned)
            self._warned.update(unserved)
        other = (
            "; chatjobs submit --model M submits to one that is served, the rows of a run with "
            "another --run"
            if workers.served
            else ""
        )
        for model in unserved:
            message = f"{nobody_serves(model, workers)}: its jobs wait until one does{other}"
            warn_caller(message, NobodyServes)

    def _read(self) -> None:
        now = time.monotonic()
        if now < self._next_read:
            return
        self._workers = published(self._redis)
        self._warned = set()
        self._next_read = now + CHECK_SECONDS
