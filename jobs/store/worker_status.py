"""The statuses that processes publish: workers that run, workers that load their models, and
recorders that are processes of their own.

Owns their types, their JSON and its one reader. presence.py and recorders.py write them to Redis.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import (
    Annotated,
    Any,
    Generic,
    NamedTuple,
    NotRequired,  # pydantic needs this one before Python 3.12
    TypeVar,
)

from pydantic import Field, TypeAdapter, ValidationError
from redis import Redis
from typing_extensions import TypedDict

from jobs import keys
from jobs.operations import CHAT
from jobs.results.model_versions import ModelVersion
from jobs.store.connection.protocol import Commands, Steps, command, retry
from jobs.store.damage import Damage

Status = TypeVar("Status")
MAX_LEASE = 2**53  # milliseconds, of a score in the set of workers: larger ones are not exact

Integer = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ProcessStatus(TypedDict):
    """Here and below, older versions do not say what is not required."""

    name: str
    host: str
    pid: NotRequired[Integer]


class ResultsStatus(TypedDict):
    """The results folder, and why rows can't be written to it now."""

    path: str
    error: str


class RecorderStatus(ProcessStatus):
    """What a recorder process says about itself."""

    started_at: Finite  # seconds since the epoch
    results: ResultsStatus


class CacheStatus(TypedDict):
    """`worker.backend.CacheUse`, in bytes."""

    used: Integer
    limit: Integer
    least: Integer


class MemoryStatus(TypedDict):
    """`worker.backend.MemoryUse`, in bytes."""

    weights: Integer
    cache: Integer
    device: NotRequired[str]
    cache_limit: NotRequired[Integer]
    free: NotRequired[Integer]
    budget: NotRequired[Integer | None]
    caches: NotRequired[dict[str, CacheStatus]]  # by the names of the models
    host_limit: NotRequired[Integer | None]
    kept: NotRequired[dict[str, Integer]]  # in host memory, by the names of the models


class ModelStatus(TypedDict):
    """One model. `share_bytes`: of the budget of its worker, if that has one."""

    names: list[str]
    weight_bytes: Integer
    share_bytes: NotRequired[Integer | None]
    pinned: NotRequired[bool]


class VersionStatus(TypedDict):
    """A `ModelVersion`."""

    model_fingerprint: str
    tokenizer_hash: NotRequired[str | None]
    chat_template_hash: NotRequired[str | None]
    dtype: NotRequired[str | None]


class ServingStatus(TypedDict):
    """What a worker serves, and its figures."""

    device: str
    paused: str  # why it claims no jobs; empty if it claims them
    models: list[str]
    names: list[str]  # of the models, in requests
    memory: MemoryStatus
    running: Integer  # sequences
    tokens_per_second: Finite
    started_at: NotRequired[Finite]
    reported_at: NotRequired[Finite]  # by the clock of Redis: report.lua adds it
    results: NotRequired[ResultsStatus | None]  # None: it writes no rows
    loading: NotRequired[dict[str, list[str]]]  # possible names, by reference, until all are loaded
    funcs: NotRequired[list[str]]  # whose jobs it runs
    about: NotRequired[dict[str, ModelStatus]]  # by model
    versions: NotRequired[dict[str, VersionStatus]]  # by name
    tokenizers: NotRequired[dict[str, str]]  # fingerprints in Redis, by name
    contexts: NotRequired[dict[str, Integer]]  # tokens of a sequence, by name
    templates: NotRequired[dict[str, bool]]  # whether requests may bring their own, by name
    states: NotRequired[dict[str, str]]  # of the models under a budget
    closed: NotRequired[list[str]]  # names for which it claims no jobs now
    failing: NotRequired[list[str]]  # names of models whose last loads have failed
    loads: NotRequired[Integer]
    evictions: NotRequired[Integer]
    room: NotRequired[dict[str, Integer]]  # sequences that it may start, by queue
    rss: NotRequired[Integer]
    healthy: NotRequired[bool]
    waiting: NotRequired[Integer]
    tokens: NotRequired[Integer]
    prompt_tokens: NotRequired[Integer]
    cached_tokens: NotRequired[Integer]
    drafted_tokens: NotRequired[Integer]
    accepted_tokens: NotRequired[Integer]
    draft_steps: NotRequired[Integer]


class WorkerStatus(ProcessStatus, ServingStatus):
    """What a worker says about itself."""

    lease_s: NotRequired[Finite]
    jobs: NotRequired[Integer]
    clock_behind: NotRequired[Integer]  # seconds by which the clock of Redis was set back


class WatchedWorker(WorkerStatus):
    """A status, and the seconds since the worker has renewed its lease, and since it has published
    the status: that is older while its loop is busy. None if that is not known, as for workers of
    older versions."""

    heartbeat_s: float | None
    report_s: float | None


class StatusFormat(Generic[Status]):
    """The JSON of one kind of status. Readers leave out unknown fields: later versions have
    further ones."""

    def __init__(self, kind: type[Status]) -> None:
        self._adapter = TypeAdapter(kind)

    def encode(self, status: Status) -> bytes:
        """As UTF-8; a path may have bytes that are no text."""
        return json.dumps(status, ensure_ascii=False).encode(errors="replace")

    def decode(self, key: str, value: bytes) -> Status | Damage:
        """The status in a key; Damage if no process of this kind has written it."""
        try:
            return self._adapter.validate_json(value, strict=True)
        except ValidationError as error:
            (place, *_) = (*error.errors(include_url=False)[0]["loc"], None)
            fault = "" if place is None else f" (the field {place})"
            problem = f"does not hold what a process says about itself{fault}"
            return Damage(key, problem, "delete it (DEL)")


WORKER = StatusFormat(WorkerStatus)
RECORDER = StatusFormat(RecorderStatus)


class WorkerStatuses(NamedTuple):
    """The statuses that workers publish, by worker name."""

    running: list[WorkerStatus]
    loading: list[WorkerStatus]  # those that serve nothing yet, since they load their models
    damaged: list[Damage]  # what no worker has written
    # Names of those that publish nothing now, so that they may serve anything: they live, but have
    # not come to publish it, as after an outage, or they have died, and are soon removed.
    silent: list[str]

    @property
    def served(self) -> set[str]:
        """The names of the models that the running workers serve."""
        return {name for worker in self.running for name in worker["names"]}

    def called(self, name: str) -> list[str]:
        """The running worker of this name; without one, all whose names begin with it."""
        names = [one["name"] for one in self.running]
        return [name] if name in names else [one for one in names if one.startswith(name)]

    def serve(self, model: str, func: str) -> int:
        """Number of running workers that take the jobs of a function for a model."""
        return sum(model in one["names"] and func in funcs_of(one) for one in self.running)

    def take_templates(self, model: str) -> bool:
        """False if a running worker of a model takes no chat template of a request, and says so: it
        may get the job, whatever the others do."""
        return all(one.get("templates", {}).get(model, True) for one in self.running)

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

    def able(self, other_than: str) -> set[str] | None:
        """The names of the models that other workers serve and can load; None if one of them does
        not say now what it serves."""
        if self.silent_ones(other_than):
            return None
        return {
            name
            for one in self.running
            if one["name"] != other_than
            for name in set(one["names"]).difference(one.get("failing", []))
        }

    def silent_ones(self, other_than: str) -> list[str]:
        """The names of the other workers that publish nothing now. Nothing may be decided for good
        from what they do not say."""
        return [name for name in self.silent if name != other_than]

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


def read_workers(redis: Redis) -> list[WorkerStatus]:
    """The status that each running worker publishes, by worker name, without values that no worker
    has written."""
    return read_statuses(redis).running


def read_statuses(redis: Redis) -> WorkerStatuses:
    """The status of each worker, and the values that are none. Raises redis.RedisError."""
    return Commands(redis).run_steps(statuses_as_steps())


def statuses_as_steps(deadline: float | None = None) -> Steps[WorkerStatuses]:
    """`read_statuses` as steps. An outage is waited out until `deadline`."""
    members = yield from retry(command("zrange", keys.WORKERS, 0, -1, withscores=True), deadline)
    found = WorkerStatuses([], [], [], [])
    leases: dict[str, float] = {}
    for member, lease in sorted(members):
        try:
            leases[member.decode()] = lease
        except UnicodeDecodeError:
            problem = f"has the member {member!r}, which is no name of a worker"
            found.damaged.append(Damage(keys.WORKERS, problem, "remove it (ZREM)"))
    names = [keys.worker(name) for name in leases]
    values = (yield from retry(command("mget", names), deadline)) if names else []
    for (name, lease), value in zip(leases.items(), values, strict=True):
        if value is None:
            if abs(lease) <= MAX_LEASE:
                found.silent.append(name)
            continue
        status = WORKER.decode(keys.worker(name), value)
        if isinstance(status, Damage):
            found.damaged.append(status)
        else:
            (found.loading if status.get("loading") else found.running).append(status)
    return found


def with_heartbeats(redis: Redis, workers: Iterable[WorkerStatus]) -> list[WatchedWorker]:
    """The workers with their last heartbeats and reports, by the clock of Redis."""
    pipeline: Any = redis.pipeline(transaction=False)
    pipeline.zrange(keys.WORKERS, 0, -1, withscores=True)
    pipeline.time()
    members, (seconds, microseconds) = pipeline.execute()
    leases, now = dict(members), seconds + microseconds / 1e6
    watched: list[WatchedWorker] = []
    for worker in workers:
        lease, length = leases.get(worker["name"].encode()), worker.get("lease_s")
        heartbeat = None
        if lease is not None and length is not None:
            heartbeat = round(max(0.0, now - lease / 1000 + length), 1)
        at = worker.get("reported_at")
        report = None if at is None else round(max(0.0, now - at), 1)
        watched.append({**worker, "heartbeat_s": heartbeat, "report_s": report})
    return watched


def read_recorders(redis: Redis, damaged: list[Damage] | None = None) -> list[RecorderStatus]:
    """The status that each recorder process publishes, by name. Values that no recorder has written
    are appended to `damaged`."""
    names: Any = redis.zrange(keys.RECORDERS, 0, -1)
    wanted = [keys.recorder(name.decode(errors="replace")) for name in sorted(names)]
    values: Any = redis.mget(wanted) if wanted else []
    found = [RECORDER.decode(key, one) for key, one in zip(wanted, values, strict=True) if one]
    if damaged is not None:
        damaged += [one for one in found if isinstance(one, Damage)]
    return [status for status in found if not isinstance(status, Damage)]


def funcs_of(worker: WorkerStatus) -> list[str]:
    """The functions whose jobs a worker runs; those of older versions do not say it."""
    return worker.get("funcs", [CHAT.func])


def _room(worker: WorkerStatus, model: str) -> int:
    """The number of sequences of a model that a worker says it may start; 0 if it does not."""
    return worker.get("room", {}).get(keys.chat_queue(model), 0)
