"""Reads workers, queues and rows at one moment: `chatjobs status` prints them, and the page of the
gateway shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from jobs import keys
from jobs.store.backlog import Unwritten, any_records, read_unwritten, recording_faults
from jobs.store.damage import Damage, find_damage
from jobs.store.eviction import read_eviction
from jobs.store.queue_depths import read_queues
from jobs.store.rq_layout import QUEUES_KEY
from jobs.store.worker_status import (
    RecorderStatus,
    WatchedWorker,
    WorkerStatus,
    WorkerStatuses,
    read_recorders,
    read_statuses,
    with_heartbeats,
)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What Redis says at one moment. `workers`: all of them; `running`, `loading` and
    `recorders`: those on the host that was asked for. `recorded`: somebody writes rows, on any
    host. `faults`: why a process can't, by name. `eviction`: why Redis may evict keys, or ""."""

    workers: WorkerStatuses
    running: Sequence[WatchedWorker]
    loading: Sequence[WorkerStatus]
    recorders: Sequence[RecorderStatus]
    queues: Sequence[dict[str, Any]]
    rows: Unwritten
    recorded: bool
    faults: Mapping[str, str]
    damaged: Sequence[Damage]
    eviction: str


def read_snapshot(redis: Redis, host: str | None = None) -> Snapshot:
    """Read all of it; `host`: see Snapshot. Raises redis.RedisError."""
    damaged = find_damage(redis)
    wrong = {one.key for one in damaged}
    workers = WorkerStatuses([], [], [], []) if keys.WORKERS in wrong else read_statuses(redis)
    recorders = [] if keys.RECORDERS in wrong else read_recorders(redis, damaged)
    queues = [] if QUEUES_KEY in wrong else read_queues(redis)
    rows = Unwritten({}) if keys.OUTBOXES in wrong else read_unwritten(redis)
    eviction = read_eviction(redis)
    running = with_heartbeats(redis, workers.running) if workers.running else []
    loading = workers.loading
    running.sort(key=lambda worker: worker.get("started_at", 0.0), reverse=True)
    for queue in queues:
        queue["workers"] = workers.serve(queue["model"], queue["func"])
    recorded = any_records([*running, *recorders])
    if host is not None:
        running = [worker for worker in running if worker["host"] == host]
        loading = [worker for worker in loading if worker["host"] == host]
        recorders = [recorder for recorder in recorders if recorder["host"] == host]
    return Snapshot(
        workers=workers,
        running=running,
        loading=loading,
        recorders=recorders,
        queues=queues,
        rows=rows,
        recorded=recorded,
        faults=recording_faults([*running, *recorders]),
        damaged=[*damaged, *workers.damaged],
        eviction=eviction,
    )
