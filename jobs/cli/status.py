"""`chatjobs status`: the running workers, the queues and what waits, once or live."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from jobs.cli.failures import Failure, NotFound, error_object, to_failure
from jobs.cli.options import Seconds, connection, json_option, redis_option
from jobs.cli.output import echo, print_json, show_view
from jobs.cli.status_tables import duration, loading_text, print_rows, print_tables
from jobs.cli.waiting import rows_wait
from jobs.sizes import counted

if TYPE_CHECKING:
    from redis import Redis

    from jobs.store.snapshot import Snapshot
    from jobs.store.worker_status import WorkerStatus


class CannotWrite(Failure):
    """A worker or a recorder can't write rows."""

    code = "unwritten_rows"


class Unhealthy(Failure):
    """The workers fail the jobs that they start."""

    code = "unhealthy"


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
    from jobs.store.snapshot import read_snapshot

    with connection(redis_url) as redis:
        if watch:
            _watch(redis, host, interval, as_json)
        snapshot = read_snapshot(redis, host)
    if as_json:
        print_json(_facts(snapshot))
    else:
        _print(snapshot, host)
    fault = _fault(snapshot, host, as_json)
    if fault is not None:
        raise fault


def _watch(redis: Redis, host: str | None, interval: float, as_json: bool) -> NoReturn:
    """Show snapshots until Ctrl-C, each in place of the last one. While Redis refuses or does not
    answer, one line says why and since when: it may answer the next time."""
    from redis import RedisError

    from jobs.errors import JobError
    from jobs.store.connection.connect import redis_failure
    from jobs.store.snapshot import read_snapshot

    failing: tuple[str, float] | None = None  # since when: the time of day, and a clock
    while True:
        now, begin = time.strftime("%H:%M:%S"), time.monotonic()
        try:
            snapshot = read_snapshot(redis, host)
        except RedisError as error:
            failing = failing or (now, begin)
            since, start = failing
            fault = redis_failure(redis, error)
            text = (
                f"{fault.message}; since {since} ({duration(time.monotonic() - start)}), trying "
                f"again every {interval:g} s"
            )
            _show_failure(to_failure(JobError(fault.code, text)), as_json)
        else:
            failing = None
            if as_json:
                print_json(_facts(snapshot))
            else:
                _show(snapshot, host)
        time.sleep(interval)


def _show_failure(failure: Failure, as_json: bool) -> None:
    if as_json:
        print_json(error_object(failure), err=True)
        return
    show_view(time.strftime("%H:%M:%S"), lambda _: failure.show())


def _show(snapshot: Snapshot, host: str | None) -> None:
    def write(screen: int | None) -> None:
        _print(snapshot, host, screen)
        fault = _fault(snapshot, host, as_json=False)
        if fault is not None:
            fault.show()

    show_view(time.strftime("%H:%M:%S"), write)


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


def _print(found: Snapshot, host: str | None, screen: int | None = None) -> None:
    """`screen`: see `print_tables`."""
    print_tables(found.running, found.loading, found.queues, found.workers, host, screen)
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
