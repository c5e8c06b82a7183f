"""The text of `chatjobs status`: tables of workers and queues, and what waits for what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobs.cli.output import echo
from jobs.cli.table import Cut, number, print_table
from jobs.cli.waiting import rows_wait
from jobs.sizes import counted

if TYPE_CHECKING:
    from jobs.store.backlog import Unwritten
    from jobs.store.worker_status import WatchedWorker, WorkerStatus, WorkerStatuses

NOTES = 3  # of one kind on a screen that does not scroll
OLD_SECONDS = 12.0  # of a report; a worker whose loop is not busy makes one every 4 seconds
DEAD_SECONDS = 8.0  # without a heartbeat, which a worker that lives makes every 4 seconds
LONG_SECONDS = 60.0  # rows that wait longer are a warning; usually it is half of that

_WORKER_NUMBERS = (
    *("memory", "RSS", "running", "tokens/s", "prompt cached", "draft accepted", "heartbeat"),
)
_COUNTS = ("deferred", "scheduled", "queued", "running", "failed")
_QUEUE_NUMBERS = (*_COUNTS, "oldest", "workers")


def print_rows(rows: Unwritten, faults: Mapping[str, str], recorded: bool) -> None:
    """Print which rows wait, and why. Usually they wait for more rows, to share a file."""
    for name, why in faults.items():
        echo(f"{name} can't write rows: {why}", err=True)
    if not rows.count or faults:
        return
    if not recorded or rows.oldest > LONG_SECONDS:
        start = "; no running worker writes rows: start one with --results DIR, or chatjobs record"
        why = "" if recorded else start
        echo(f"{rows_wait(rows)}{why}", err=True)
    else:
        echo(rows_wait(rows))


def loading_text(worker: WorkerStatus) -> str:
    return f"worker {worker['name']} is loading {', '.join(worker['loading'])}"


def print_tables(
    workers: Sequence[WatchedWorker],
    loading: Sequence[WorkerStatus],
    queues: Sequence[dict[str, Any]],
    statuses: WorkerStatuses,
    host: str | None,
    screen: int | None = None,
) -> None:
    """Print what runs and what waits. `screen`: the lines of one that does not scroll, which shows
    what an operator should see first: workers that are paused, and jobs that wait longest."""
    from jobs.client.serving import nobody_takes

    caches = _caches(workers)
    tables = bool(workers) + bool(caches) + bool(queues)
    share = None if screen is None else max(0, screen - 2 * NOTES) // max(1, tables)

    def cut(importance: Iterable[float]) -> Cut | None:
        return None if share is None else Cut(share, [*importance])

    most = None if screen is None else NOTES
    if workers:
        print_table(
            ("worker", "models", "device", *map(number, _WORKER_NUMBERS)),
            [_cells(worker) for worker in workers],
            cut=cut(bool(worker["paused"]) for worker in workers),
        )
        if caches:
            echo()
            print_table(
                ("KV cache of", number("now"), number("at most"), number("at least"), "worker"),
                caches,
                cut=cut(0 for _ in caches),
            )
    elif not loading:
        echo("no workers" if host is None else f"no workers on host {host}")
    _print_notes(
        (f"worker {name} keeps in host memory: {kept}" for name, kept in _kept(workers)), most
    )
    _print_notes(map(loading_text, loading), most)
    _print_notes(
        (
            f"worker {worker['name']} claims no jobs: {worker['paused']}"
            for worker in workers
            if worker["paused"]
        ),
        most,
        err=True,
    )
    _print_notes(
        (
            f"worker {worker['name']} has not reported for {duration(worker['report_s'])}, though "
            "it renews its lease: its figures are so old"
            for worker in workers
            if (worker["report_s"] or 0.0) > OLD_SECONDS
            and (worker["heartbeat_s"] or 0.0) < DEAD_SECONDS
        ),
        most,
    )
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
            [
                [queue["name"], *(queue[name] for name in _COUNTS), *_serving(queue)]
                for queue in queues
            ],
            cut=cut(queue["oldest_s"] + _waits(queue) for queue in queues),
        )
        if failed := sum(queue["failed"] for queue in queues):
            echo(f"{counted(failed, 'failed job')}: chatjobs jobs list --state failed")
    else:
        echo("no queues")
    unserved = {
        nobody_takes(one["model"], one["func"], statuses)
        for one in queues
        if _waits(one) and not one["workers"]
    }
    _print_notes([f"{clause}: its jobs wait" for clause in sorted(unserved)], most, err=True)


def _print_notes(notes: Iterable[str], most: int | None, *, err: bool = False) -> None:
    """Print sentences of one kind, at most so many."""
    found = [*notes]
    for note in found[:most]:
        echo(note, err=err)
    if left := len(found[len(found) if most is None else most :]):
        echo(f"and {left:,} more like this", err=err)


def _kept(workers: Sequence[WatchedWorker]) -> Iterator[tuple[str, str]]:
    """The names of the workers that keep models in host memory, and these models."""
    for one in workers:
        if kept := one["memory"].get("kept"):
            yield one["name"], ", ".join(f"{model} ({_size(size)})" for model, size in kept.items())


def _caches(workers: Sequence[WatchedWorker]) -> list[tuple[object, ...]]:
    """How the models of a worker share the memory for caches, if there are several."""
    return [
        (model, *map(_size, (cache["used"], cache["limit"], cache["least"])), worker["name"])
        for worker in workers
        if len(caches := worker["memory"].get("caches", {})) > 1
        for model, cache in caches.items()
    ]


def _cells(worker: WatchedWorker) -> tuple[object, ...]:
    """The row of a worker in the table."""
    used = worker["memory"]["weights"] + worker["memory"]["cache"]
    return (
        worker["name"],
        ", ".join(_model(name, worker.get("states", {})) for name in worker["models"]),
        worker["device"],
        _size(used),
        _size(worker.get("rss")),
        "paused" if worker["paused"] else worker["running"],
        f"{worker['tokens_per_second']:,.0f}",
        _share(worker.get("cached_tokens", 0), worker.get("prompt_tokens", 0)),
        _accepted(worker),
        duration(worker["heartbeat_s"]),
    )


def _model(name: str, states: Mapping[str, str]) -> str:
    """A model, with its state if it takes no jobs now: a (cold)."""
    state = states.get(name, "ready")
    return name if state == "ready" else f"{name} ({state})"


def _serving(queue: dict[str, Any]) -> tuple[str, object]:
    """The last cells of a queue: the wait of its first job, and who takes its jobs."""
    wait = duration(queue["oldest_s"]) if queue["queued"] else "-"
    return wait, queue["workers"] or ("nobody" if _waits(queue) else 0)


def _waits(queue: dict[str, Any]) -> bool:
    return bool(queue["queued"] or queue["scheduled"] or queue["deferred"])


def duration(seconds: float | None) -> str:
    """Seconds in at most four characters or so; a dash if they are not known."""
    if seconds is None:
        return "-"
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(nbytes: int | None) -> str:
    return f"{nbytes / 2**20:,.0f} MiB" if nbytes else "-"


def _share(part: int, whole: int) -> str:
    """A percentage, or a dash if there is nothing to share."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _accepted(worker: WorkerStatus) -> str:
    """The share of accepted draft tokens, and their number per step; a dash without drafts."""
    accepted, steps = worker.get("accepted_tokens", 0), worker.get("draft_steps", 0)
    if not steps:
        return "-"
    return f"{_share(accepted, worker.get('drafted_tokens', 0))}, {accepted / steps:.1f} a step"
