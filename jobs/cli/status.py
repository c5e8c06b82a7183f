"""`chatjobs status`: the running workers and the queue lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jobs import keys
from jobs.cli.failures import Failure, NotFound
from jobs.cli.options import connection, json_option, redis_option
from jobs.cli.output import echo, print_json
from jobs.cli.table import number, print_table
from jobs.cli.waiting import rows_wait
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs.store.backlog import Unwritten
    from jobs.store.worker_status import Published


LONG_SECONDS = 60.0  # rows that wait longer are mentioned; usually it is half of that


class CannotWrite(Failure):
    """A worker or a recorder can't write rows."""

    code = "unwritten_rows"


_WORKER_NUMBERS = ("memory", "running", "tokens/s", "prompt cached", "draft accepted")
_QUEUE_NUMBERS = ("deferred", "scheduled", "queued", "running", "failed", "workers")


class Unhealthy(Failure):
    """The workers fail the jobs that they start."""

    code = "unhealthy"


@click.command()
@click.option("--host", metavar="H", help="Only workers on host H; exit code 1 if none works.")
@json_option
@redis_option
def status(host: str | None, as_json: bool, redis_url: str) -> None:
    """Show workers, their models and memory, those that still load, recorders, queue lengths, rows
    that wait for Parquet, and whether Redis may evict keys.

    Exit code 1 if rows can't be written, or if values in Redis can't be read.
    """
    from jobs.store.backlog import Unwritten, any_records, read_unwritten, recording_faults
    from jobs.store.damage import find_damage
    from jobs.store.eviction import read_eviction
    from jobs.store.queue_depths import read_queues
    from jobs.store.recorders import read_recorders
    from jobs.store.rq_layout import QUEUES_KEY
    from jobs.store.worker_status import Published, published

    with connection(redis_url) as redis:
        damaged = find_damage(redis)
        wrong = {one.key for one in damaged}
        workers = Published([], [], []) if keys.WORKERS in wrong else published(redis)
        recorders = [] if keys.RECORDERS in wrong else read_recorders(redis)
        lengths = [] if QUEUES_KEY in wrong else read_queues(redis)
        rows = Unwritten({}) if keys.OUTBOXES in wrong else read_unwritten(redis)
        eviction = read_eviction(redis)
    damaged += workers.damaged
    running, loading = workers.running, workers.loading
    running.sort(key=_started_at, reverse=True)
    for queue in lengths:
        queue["workers"] = workers.serve(queue["model"], queue["func"])
    recorded = any_records([*running, *recorders])
    if host is not None:
        running = [worker for worker in running if worker["host"] == host]
        loading = [worker for worker in loading if worker["host"] == host]
        recorders = [recorder for recorder in recorders if recorder["host"] == host]
    faults = recording_faults([*running, *recorders])
    if as_json:
        found = [one._asdict() for one in damaged]
        waiting = {"waiting": rows.count, "oldest_s": round(rows.oldest, 1), "runs": rows.runs}
        waiting["errors"] = faults
        print_json(
            {
                "workers": running,
                "loading": [_loader(worker) for worker in loading],
                "recorders": recorders,
                "queues": lengths,
                "rows": waiting,
                "damaged": found,
                "eviction": eviction or None,
            }
        )
    else:
        _print_tables(running, loading, lengths, workers, host)
        if eviction and not any(worker["paused"] == eviction for worker in running):
            echo(f"{eviction}; until then, workers and submits are refused", err=True)
        for recorder in recorders:
            place = f"{recorder['host']}:{recorder['results']['path']}"
            echo(f"recorder {recorder['name']} writes rows to {place}")
        kinds = {one["name"]: "recorder" for one in recorders}
        named = {f"{kinds.get(name, 'worker')} {name}": why for name, why in faults.items()}
        _print_rows(rows, named, recorded)
    if host is not None and not running:
        raise NotFound(
            f"no worker on host {host} serves yet: {'; '.join(map(_loads, loading))}"
            if loading
            else f"no worker is running on host {host}"
        )
    sick = [worker for worker in running if not worker.get("healthy", True)]
    if host is not None and len(sick) == len(running):
        why = "; ".join(sorted({worker["paused"] for worker in sick}))
        raise Unhealthy(f"all workers on host {host} claim no jobs until one works: {why}")
    if faults and host is None:  # a restart, which follows from --host, would mend nothing
        kind = "recorder" if faults.keys() <= {one["name"] for one in recorders} else "worker"
        raise CannotWrite(
            f"{counted(len(faults), kind)} can't write rows; {rows_wait(rows)}",
            lines=[f"{name}: {why}" for name, why in faults.items()] if as_json else (),
        )
    if damaged:
        raise Failure(
            f"{counted(len(damaged), 'value')} in Redis can't be read",
            lines=[str(one) for one in damaged],
        )


def _print_rows(rows: Unwritten, faults: Mapping[str, str], recorded: bool) -> None:
    """Print why rows wait, unless they wait only for more rows, to share a file."""
    for name, why in faults.items():
        echo(f"{name} can't write rows: {why}", err=True)
    if rows.count and not faults and (not recorded or rows.oldest > LONG_SECONDS):
        start = "; no running worker writes rows: start one with --results DIR, or chatjobs record"
        why = "" if recorded else start
        echo(f"{rows_wait(rows)}{why}", err=True)


def _loader(worker: dict[str, Any]) -> dict[str, Any]:
    """A worker that loads, for JSON."""
    facts = {name: worker.get(name) for name in ("name", "host", "pid", "started_at")}
    return {**facts, "models": list(worker["loading"])}


def _loads(worker: dict[str, Any]) -> str:
    return f"worker {worker['name']} is loading {', '.join(worker['loading'])}"


def _print_tables(
    workers: list[dict[str, Any]],
    loading: list[dict[str, Any]],
    queues: list[dict[str, Any]],
    published: Published,
    host: str | None,
) -> None:
    from jobs.client.serving import nobody_takes

    if workers:
        print_table(
            ("worker", "models", "device", *map(number, _WORKER_NUMBERS)),
            [_cells(worker) for worker in workers],
        )
    elif not loading:
        echo("no workers" if host is None else f"no workers on host {host}")
    for worker in loading:
        echo(_loads(worker))
    for worker in workers:
        if worker["paused"]:
            echo(f"worker {worker['name']} claims no jobs: {worker['paused']}", err=True)
    if behind := max((worker.get("clock_behind", 0) for worker in workers), default=0):
        echo(
            f"the clock of Redis was set back: it is {behind} s behind the time that it had; keys "
            "that expire are kept for so much longer",
            err=True,
        )
    if queues:
        echo()
        print_table(
            ("queue", *map(number, _QUEUE_NUMBERS)),
            [[queue["name"], *(queue[name] for name in _QUEUE_NUMBERS)] for queue in queues],
        )
    else:
        echo("no queues")
    for clause in sorted(
        {
            nobody_takes(one["model"], one["func"], published)
            for one in queues
            if (one["queued"] or one["scheduled"] or one["deferred"]) and not one["workers"]
        }
    ):
        echo(f"{clause}: its jobs wait", err=True)


def _started_at(worker: dict[str, Any]) -> float:
    """The start of a worker in seconds since the epoch; 0 if the worker does not publish it."""
    found = worker.get("started_at")
    return float(found) if isinstance(found, int | float) else 0.0


def _cells(worker: dict[str, Any]) -> tuple[object, ...]:
    """The row of a worker in the table."""
    used = (worker["memory"]["weights"] + worker["memory"]["cache"]) / 2**20
    return (
        worker["name"],
        ", ".join(worker["models"]),
        worker["device"],
        f"{used:,.0f} MiB",
        "paused" if worker["paused"] else worker["running"],
        f"{worker['tokens_per_second']:,.0f}",
        _share(worker.get("cached_tokens", 0), worker.get("prompt_tokens", 0)),
        _accepted(worker),
    )


def _share(part: int, whole: int) -> str:
    """A percentage, or a dash if there is nothing to share."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _accepted(worker: dict[str, Any]) -> str:
    """The share of accepted draft tokens, and their number per step; a dash without drafts."""
    accepted, steps = worker.get("accepted_tokens", 0), worker.get("draft_steps", 0)
    if not steps:
        return "-"
    return f"{_share(accepted, worker['drafted_tokens'])}, {accepted / steps:.1f} a step"
