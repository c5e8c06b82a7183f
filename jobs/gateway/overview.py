"""Makes the JSON that the page shows each tenant: queues, workers, models, runs and jobs.

Redis is read with a connection that waits for no outage, at most once in READ_SECONDS for all who
look, and only while somebody does. The reader is that of `chatjobs status`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from redis import RedisError

from jobs.client.client import Client
from jobs.errors import JobError
from jobs.gateway.failures import SHOWN as SHOWN_CHARACTERS
from jobs.gateway.redis_waits import HANG_SECONDS
from jobs.gateway.run_progress import RunProgress, RunReader
from jobs.gateway.served import Model, models_of
from jobs.gateway.settings import Settings
from jobs.gateway.tenants import Tenant
from jobs.operations import CHAT
from jobs.results.files import Results
from jobs.results.outbox import DEFAULT_RUN
from jobs.store.connection.connect import limit_waits, redis_failure
from jobs.store.connection.protocol import collect, run_sync
from jobs.store.find_jobs import FoundJob, Selection, newest_jobs
from jobs.store.job_state import Status
from jobs.store.snapshot import Snapshot, read_snapshot
from jobs.store.worker_status import WatchedWorker, WorkerStatus

READ_SECONDS = 1.5  # between two reads
NEWEST = 100  # jobs that run, and that have ended, of all tenants, that are looked at
SHOWN_JOBS = 10  # of each of these, for one tenant
SHOWN_RUNS = 12
SHOWN_WORKERS = SHOWN_QUEUES = SHOWN_MODELS = 200
ENDED = (Status.FINISHED, Status.FAILED, Status.CANCELLED)
COUNTS = ("deferred", "scheduled", "queued", "running", "failed")


@dataclass(frozen=True, slots=True)
class Look:
    """What was read at one moment, `at`, in seconds since the epoch."""

    at: float
    snapshot: Snapshot
    models: Mapping[str, Model]
    running: Sequence[FoundJob]
    ended: Sequence[FoundJob]
    runs: Sequence[RunProgress]


class Overview:
    """The last look, for all tenants."""

    def __init__(self, settings: Settings) -> None:
        self._client = Client(settings.redis_url)
        limit_waits(self._client.redis, HANG_SECONDS)
        self._runs = RunReader(Results(settings.results))
        self._lock = asyncio.Lock()
        self._next_read = 0.0
        self._look: Look | None = None

    async def read(self, tenant: Tenant) -> dict[str, Any]:
        """What a tenant may see. Raises JobError if Redis can't be read."""
        async with self._lock:
            look = self._look
            if look is None or time.monotonic() >= self._next_read:
                look = self._look = await asyncio.to_thread(self._read)
                self._next_read = time.monotonic() + READ_SECONDS
        return view_of(look, tenant)

    def close(self) -> None:
        self._client.close()

    def _read(self) -> Look:
        redis = self._client.redis
        try:
            snapshot = read_snapshot(redis)
            runs = self._runs.read(redis, snapshot.rows.runs)
        except RedisError as error:
            raise redis_failure(redis, error) from error
        running, ended = self._jobs((Status.STARTED,)), self._jobs(ENDED)
        models = dict(sorted(models_of(snapshot.workers).items()))
        return Look(time.time(), snapshot, models, running, ended, runs)

    def _jobs(self, states: tuple[Status, ...]) -> list[FoundJob]:
        deadline = time.monotonic() + HANG_SECONDS
        steps = collect(newest_jobs(Selection(states), NEWEST, deadline), lambda one: one)
        try:
            return run_sync(steps, self._client.connection)
        except JobError as error:
            if error.code == "unavailable":
                raise
            return []  # of a damaged key, which the snapshot names


def view_of(look: Look, tenant: Tenant) -> dict[str, Any]:
    """A look as JSON for a tenant. One with a name sees its own jobs and runs; of queues and
    workers what says how busy they are, and no host, no path and no error of the machines."""
    found = look.snapshot
    everything = tenant.name is None
    workers = [
        *(_worker(one, number, everything) for number, one in enumerate(found.running, 1)),
        *(_loading(one, everything) for one in found.loading),
    ]
    runs = [(tenant.run_name(one.run), one) for one in look.runs]
    return {
        "at": round(look.at, 3),
        "tenant": tenant.name,
        "workers": workers[:SHOWN_WORKERS],
        "queues": [_queue(one) for one in found.queues[:SHOWN_QUEUES]],
        "models": [_model(one, found) for one in islice(look.models.values(), SHOWN_MODELS)],
        "runs": [_run(name, one) for name, one in runs if name is not None][:SHOWN_RUNS],
        "jobs": {
            "running": _jobs(look.running, tenant, look.at),
            "ended": _jobs(look.ended, tenant, look.at),
        },
        "rows": {"waiting": found.rows.count, "oldest_s": round(found.rows.oldest, 1)}
        if everything
        else None,
        "notices": list(_notices(found)) if everything else [],
    }


def _worker(one: WatchedWorker, number: int, everything: bool) -> dict[str, Any]:
    states = one.get("states", {})
    memory = one["memory"]
    return {
        "name": one["name"] if everything else f"worker {number}",
        "host": one["host"] if everything else None,
        "device": one["device"],
        "models": [{"name": name, "state": states.get(name, "ready")} for name in one["models"]],
        "state": "paused" if one["paused"] else "running",
        "reason": one["paused"] if everything else "",
        "running": one["running"],
        "waiting": one.get("waiting", 0),
        "tokens_per_second": round(one["tokens_per_second"], 1),
        "memory": memory["weights"] + memory["cache"],
        "heartbeat_s": one["heartbeat_s"],
    }


def _loading(one: WorkerStatus, everything: bool) -> dict[str, Any]:
    return {
        "name": one["name"] if everything else "a new worker",
        "host": one["host"] if everything else None,
        "device": one["device"],
        "models": [{"name": name, "state": "loading"} for name in one.get("loading", {})],
        "state": "loading",
        "reason": "",
        "running": 0,
        "waiting": 0,
        "tokens_per_second": 0.0,
        "memory": 0,
        "heartbeat_s": None,
    }


def _queue(one: Mapping[str, Any]) -> dict[str, Any]:
    names = ("name", "model", *COUNTS, "oldest_s", "workers")
    return {name: one[name] for name in names}


def _model(one: Model, found: Snapshot) -> dict[str, Any]:
    """A name that requests may give. `workers`: those that run chats of it."""
    return {
        "id": one.id,
        "root": one.root,
        "max_model_len": one.max_model_len,
        "workers": found.workers.serve(one.id, CHAT.func),
    }


def _run(name: str, one: RunProgress) -> dict[str, Any]:
    return {
        "run": name,
        "state": one.state,
        "rows": one.rows,
        "failed": one.failed,
        "expected": one.expected,
        "unwritten": one.unwritten,
    }


def _jobs(found: Iterable[FoundJob], tenant: Tenant, now: float) -> list[dict[str, Any]]:
    own = [one for one in found if tenant.owns(one.state.request)][:SHOWN_JOBS]
    return [_job(one, tenant, now) for one in own]


def _job(one: FoundJob, tenant: Tenant, now: float) -> dict[str, Any]:
    request = one.state.request
    run = tenant.run_name(one.run)
    return {
        "id": one.state.id,
        "model": str(request.get("model"))[:SHOWN_CHARACTERS],
        "state": one.state.status,
        "run": None if run == DEFAULT_RUN else run,
        "chat": one.state.func == CHAT.func,  # of other jobs there is no stream
        "age_s": round(max(0.0, now - one.since), 1),
        "code": one.code,
    }


def _notices(found: Snapshot) -> Iterable[str]:
    """What an operator should know."""
    if found.eviction:
        yield found.eviction
    for name, why in found.faults.items():
        yield f"{name} can't write rows: {why}"
    for one in found.damaged:
        yield str(one)
