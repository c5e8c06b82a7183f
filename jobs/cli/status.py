"""`chatjobs status`: the running workers, the queues and what waits, once or live."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from jobs import keys
from jobs.cli.failures import Failure, NotFound
from jobs.cli.options import Seconds, connection, json_option, redis_option
from jobs.cli.output import clear_terminal, echo, print_json
from jobs.cli.status_tables import loading_text, print_rows, print_tables
from jobs.cli.waiting import rows_wait
from jobs.sizes import counted

if TYPE_CHECKING:
    from redis import Redis

    from jobs.store.backlog import Unwritten
    from jobs.store.damage import Damage
    from jobs.store.worker_status import (
        RecorderStatus,
        WatchedWorker,
        WorkerStatus,
        WorkerStatuses,
    )


class CannotWrite(Failure):
    """A worker or a recorder can't write rows."""

    code = "unwritten_rows"


class Unhealthy(Failure):
    """The workers fail the jobs that they start."""

    code = "unhealthy"


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


@click.command()
@click.option("--host", metavar="H", help="Only workers on host H; exit code 1 if none works.")
@click.option("-w", "--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--interval",
    type=Seconds(min=0.1),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks of --watch.",
)
@json_option
@redis_option
def status(host: str | None, watch: bool, interval: float, as_json: bool, redis_url: str) -> None:
    """Show workers, their models and memory, those that still load, recorders, queue lengths, rows
    that wait for Parquet, and whether Redis may evict keys.

    Exit code 1 if rows can't be written, or if values in Redis can't be read.
    """
    with connection(redis_url) as redis:
        while watch:
            _look_again(redis, host, interval, as_json)
        snapshot = _read(redis, host)
    if as_json:
        print_json(_facts(snapshot))
    else:
        _print(snapshot, host)
    fault = _fault(snapshot, host, as_json)
    if fault is not None:
        raise fault


def _look_again(redis: Redis, host: str | None, interval: float, as_json: bool) -> None:
    """Show a snapshot in place of the last one, and pause. An error of Redis is shown as well: it
    may reply the next time."""
    from redis import RedisError

    from jobs.store.connection.connect import redis_failure

    try:
        snapshot = _read(redis, host)
    except RedisError as error:
        clear_terminal()
        echo(redis_failure(redis, error).message, err=True)
    else:
        if as_json:
            print_json(_facts(snapshot))
        else:
            clear_terminal()
            echo(time.strftime("%H:%M:%S"))
            _print(snapshot, host)
            fault = _fault(snapshot, host, as_json)
            if fault is not None:
                fault.show()
    time.sleep(interval)


def _read(redis: Redis, host: str | None) -> Snapshot:
    """Raises redis.RedisError."""
    from jobs.store.backlog import Unwritten, any_records, read_unwritten, recording_faults
    from jobs.store.damage import find_damage
    from jobs.store.eviction import read_eviction
    from jobs.store.queue_depths import read_queues
    from jobs.store.rq_layout import QUEUES_KEY
    from jobs.store.worker_status import (
        WorkerStatuses,
        read_recorders,
        read_statuses,
        with_heartbeats,
    )

    damaged = find_damage(redis)
    wrong = {one.key for one in damaged}
    workers = WorkerStatuses([], [], []) if keys.WORKERS in wrong else read_statuses(redis)
    recorders = [] if keys.RECORDERS in wrong else read_recorders(redis)
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


def _facts(found: Snapshot) -> dict[str, Any]:
    """A snapshot as JSON."""
    rows = found.rows
    waiting = {"waiting": rows.count, "oldest_s": round(rows.oldest, 1), "runs": rows.runs}
    waiting["errors"] = found.faults
    return {
        "workers": found.running,
        "loading": [_loader(worker) for worker in found.loading],
        "recorders": found.recorders,
        "queues": found.queues,
        "rows": waiting,
        "damaged": [one._asdict() for one in found.damaged],
        "eviction": found.eviction or None,
    }


def _print(found: Snapshot, host: str | None) -> None:
    print_tables(found.running, found.loading, found.queues, found.workers, host)
    eviction = found.eviction
    if eviction and not any(worker["paused"] == eviction for worker in found.running):
        echo(f"{eviction}; until then, workers and submits are refused", err=True)
    for recorder in found.recorders:
        place = f"{recorder['host']}:{recorder['results']['path']}"
        echo(f"recorder {recorder['name']} writes rows to {place}")
    kinds = {one["name"]: "recorder" for one in found.recorders}
    named = {f"{kinds.get(name, 'worker')} {name}": why for name, why in found.faults.items()}
    print_rows(found.rows, named, found.recorded)


def _fault(found: Snapshot, host: str | None, as_json: bool) -> Failure | None:
    """What makes the exit code 1."""
    running, faults = found.running, found.faults
    if host is not None and not running:
        return NotFound(
            f"no worker on host {host} serves yet: {'; '.join(map(loading_text, found.loading))}"
            if found.loading
            else f"no worker is running on host {host}"
        )
    sick = [worker for worker in running if not worker.get("healthy", True)]
    if host is not None and len(sick) == len(running):
        why = "; ".join(sorted({worker["paused"] for worker in sick}))
        return Unhealthy(f"all workers on host {host} claim no jobs until one works: {why}")
    if faults and host is None:  # a restart, which follows from --host, would mend nothing
        kind = "recorder" if faults.keys() <= {one["name"] for one in found.recorders} else "worker"
        return CannotWrite(
            f"{counted(len(faults), kind)} can't write rows; {rows_wait(found.rows)}",
            lines=[f"{name}: {why}" for name, why in faults.items()] if as_json else (),
        )
    if found.damaged:
        return Failure(
            f"{counted(len(found.damaged), 'value')} in Redis can't be read",
            lines=[str(one) for one in found.damaged],
        )
    return None


def _loader(worker: WorkerStatus) -> dict[str, Any]:
    """A worker that loads, for JSON."""
    facts = {name: worker.get(name) for name in ("name", "host", "pid", "started_at")}
    return {**facts, "models": list(worker["loading"])}
