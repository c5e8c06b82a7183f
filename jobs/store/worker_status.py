"""Reads the statuses that processes publish: workers that run, workers that load their models, and
recorders that are processes of their own.

presence.py and recorders.py write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from redis import Redis

from jobs import keys
from jobs.operations import CHAT
from jobs.results.model_versions import ModelVersion
from jobs.store.connection.protocol import Steps, command, retry
from jobs.store.damage import Damage


class Published(NamedTuple):
    """The statuses that workers publish, by worker name."""

    running: list[dict[str, Any]]
    loading: list[dict[str, Any]]  # those that serve nothing yet, since they load their models
    damaged: list[Damage]  # what no worker has written

    @property
    def served(self) -> set[str]:
        """The names of the models that the running workers serve."""
        return {name for worker in self.running for name in worker["names"]}

    def called(self, name: str) -> list[str]:
        """The running worker of this name; without one, all whose names begin with it."""
        names = [str(one["name"]) for one in self.running]
        return [name] if name in names else [one for one in names if one.startswith(name)]

    def serve(self, model: str, func: str) -> int:
        """Number of running workers that take the jobs of a function for a model."""
        return sum(model in one["names"] and func in funcs_of(one) for one in self.running)

    def versions(self, model: str) -> dict[str, ModelVersion]:
        """The version of a model that each running worker serves, by the worker's name, as far as
        it says so: one that has not loaded the model yet, or is of an older version, does not."""
        found = {one["name"]: one.get("versions", {}).get(model) for one in self.running}
        return {name: ModelVersion.of(one) for name, one in found.items() if one is not None}

    def ready(self, other_than: str) -> set[str]:
        """The names of the models that other workers have in memory, and claim jobs for."""
        return {
            name
            for one in self.running
            if one["name"] != other_than and not one["paused"]
            for name in set(one["names"]).difference(one.get("closed", []))
        }

    def able(self, other_than: str) -> set[str]:
        """The names of the models that other workers serve and can load."""
        return {
            name
            for one in self.running
            if one["name"] != other_than
            for name in set(one["names"]).difference(one.get("failing", []))
        }

    def contexts(self, model: str, func: str) -> dict[str, int]:
        """The tokens that a sequence of a model may have, by the names of the running workers that
        run a function for it, as far as they say so; those with the most room first."""
        found = [
            one
            for one in self.running
            if model in one.get("contexts", {}) and func in funcs_of(one)
        ]
        found.sort(key=lambda one: -_room(one, model))
        return {one["name"]: one["contexts"][model] for one in found}

    def without(self, model: str, func: str) -> list[str]:
        """The names of the running workers that serve a model and do not run a function."""
        return [
            one["name"]
            for one in self.running
            if model in one["names"] and func not in funcs_of(one)
        ]


def read_workers(redis: Redis) -> list[dict[str, Any]]:
    """The status that each running worker publishes, by worker name, without values that no worker
    has written."""
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
    names = _worker_keys(found)
    values: Any = redis.mget(names) if names else []
    for name, value in zip(names, values, strict=True):
        status = _read(value, _is_worker) if value is not None else None
        if status is not None:
            (loading if _loads(status) else running).append(status)
        elif value is not None:
            problem = "does not hold what a worker says about itself"
            damaged.append(Damage(name, problem, "delete it (DEL)"))
    return Published(running, loading, damaged)


def add_heartbeats(redis: Redis, workers: Iterable[dict[str, Any]]) -> None:
    """Add `heartbeat_s` to the status of each worker: seconds since it has renewed its lease, by
    the clock of Redis; None if that is not known, as for workers of older versions."""
    pipeline: Any = redis.pipeline(transaction=False)
    pipeline.zrange(keys.WORKERS, 0, -1, withscores=True)
    pipeline.time()
    members, (seconds, microseconds) = pipeline.execute()
    leases, now = dict(members), seconds + microseconds / 1e6
    for worker in workers:
        lease = leases.get(worker["name"].encode(errors="replace"))
        length = worker.get("lease_s")
        worker["heartbeat_s"] = None
        if lease is not None and isinstance(length, int | float):
            worker["heartbeat_s"] = round(max(0.0, now - lease / 1000 + length), 1)


def read_published(deadline: float | None = None) -> Steps[Published]:
    """`published` as steps, without damage."""
    members = yield from retry(command("zrange", keys.WORKERS, 0, -1), deadline)
    names = _worker_keys(members)
    values = (yield from retry(command("mget", names), deadline)) if names else []
    found = [_read(value, _is_worker) for value in values if value is not None]
    known = [status for status in found if status is not None]
    loading = [status for status in known if _loads(status)]
    return Published([status for status in known if not _loads(status)], loading, [])


def read_recorders(redis: Redis) -> list[dict[str, Any]]:
    """The status that each recorder process publishes, by name: `name`, `host`, `pid`,
    `started_at`, and `results` with `path` and `error`. Values that no recorder has written are
    left out."""
    names: Any = redis.zrange(keys.RECORDERS, 0, -1)
    wanted = [keys.recorder(name.decode(errors="replace")) for name in sorted(names)]
    values: Any = redis.mget(wanted) if wanted else []
    found = [_read(value, _is_recorder) for value in values if value is not None]
    return [status for status in found if status is not None]


def funcs_of(worker: Mapping[str, Any]) -> list[str]:
    """The functions whose jobs a worker runs; those of older versions do not say it."""
    funcs: list[str] = worker.get("funcs", [CHAT.func])
    return funcs


def _room(worker: Mapping[str, Any], model: str) -> int:
    """The number of sequences of a model that a worker says it may start; 0 if it does not."""
    room = worker.get("room")
    found = room.get(keys.chat_queue(model), 0) if isinstance(room, dict) else 0
    return found if isinstance(found, int) else 0


def _worker_keys(members: Iterable[bytes]) -> list[str]:
    """The keys of the workers that are members of keys.WORKERS, by name."""
    return [keys.worker(name.decode()) for name in sorted(members) if _is_text(name)]


def _loads(status: Mapping[str, Any]) -> bool:
    """True if a worker still loads its models; those of older versions do not say it."""
    return bool(status.get("loading"))


def _is_text(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(value: bytes, is_status: Callable[[Any], bool]) -> dict[str, Any] | None:
    """A status that a process has published; None for any other value."""
    try:
        found: dict[str, Any] = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if is_status(found) else None


def _is_worker(value: Any) -> bool:
    match value:
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
        } if _are_texts([*models, *names]):
            counted = ("cached_tokens", "prompt_tokens", "clock_behind")
            counts = [value.get(name, 0) for name in counted]
            lists = (value.get(name, []) for name in ("funcs", "closed", "failing"))
            return (
                all(isinstance(one, int) for one in counts)
                and all(map(_are_texts, lists))
                and _is_loading(value.get("loading", {}))
                and _are_states(value.get("states", {}))
                and _is_about(value.get("about", {}))
                and _are_versions(value.get("versions", {}))
                and _are_contexts(value.get("contexts", {}))
            )
    return False


def _is_recorder(value: Any) -> bool:
    match value:
        case {
            "name": str(),
            "host": str(),
            "pid": int(),
            "started_at": int() | float(),
            "results": {"path": str(), "error": str()},
        }:
            return True
    return False


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_states(value: Any) -> bool:
    return isinstance(value, dict) and _are_texts(list(value.values()))


def _is_about(value: Any) -> bool:
    """True if a value holds what a worker says about each of its models."""
    return isinstance(value, dict) and all(map(_is_about_model, value.values()))


def _is_about_model(value: Any) -> bool:
    match value:
        case {"names": [*names], "weight_bytes": int()}:
            pinned, share = value.get("pinned", False), value.get("share_bytes")
            return _are_texts(names) and isinstance(pinned, bool) and isinstance(share, int | None)
    return False


def _is_loading(value: Any) -> bool:
    """True if a value holds the possible names of models, by their references."""
    return isinstance(value, dict) and all(map(_are_texts, value.values()))


def _are_versions(value: Any) -> bool:
    """True if a value holds versions of models, by their names."""
    return isinstance(value, dict) and all(
        isinstance(one, dict)
        and isinstance(one.get("model_fingerprint"), str)
        and all(isinstance(part, str | None) for part in one.values())
        for one in value.values()
    )


def _are_contexts(value: Any) -> bool:
    """True if a value holds numbers of tokens, by the names of models."""
    return isinstance(value, dict) and all(isinstance(one, int) for one in value.values())
