"""Shared by the benchmarks: alternating rounds, medians, and the environment of a measurement."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from jobs import Client
from jobs.store.worker_status import read_workers

MIB = 2**20


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int
) -> dict[str, list[float]]:
    """Run each contestant once per round and return the figures of each.

    The order rotates from round to round. A first round warms up and is not counted. A contestant
    returns its own figure, such as tokens/s or rows/s.
    """
    names = list(contestants)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        order = names[number % len(names) :] + names[: number % len(names)]
        for name in order:
            figure = contestants[name]()
            if number:
                figures[name].append(figure)
            print(f"  round {number}: {name}: {figure:.4g}", file=sys.stderr)
    return figures


def seconds(work: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call, including work queued on the GPU."""
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def first_line(error: BaseException) -> str:
    """Of its message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def median(figures: list[float]) -> float:
    return statistics.median(figures)


def wait_for_worker(client: Client, worker: subprocess.Popen[bytes], limit: float) -> None:
    """Return when a worker process has loaded its model. Raises ClickException if it ends, or after
    `limit` seconds."""
    deadline = time.monotonic() + limit
    while not read_workers(client.redis):
        if worker.poll() is not None:
            raise click.ClickException(f"the worker ended with exit code {worker.returncode}")
        if time.monotonic() > deadline:
            raise click.ClickException(f"the worker has not loaded its model after {limit:g} s")
        time.sleep(0.1)


def resident_bytes(pid: int) -> dict[str, int]:
    """VmRSS and VmHWM of a process, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    pairs = (line.split() for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in pairs}


def environment(device: str) -> dict[str, str]:
    """Date, device, threads and package versions of a measurement."""
    from worker.device import device_name

    packages = {}
    for name in ("chatjobs", "torch", "transformers", "tokenizers", "redis", "rq"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "device": device_name(torch.device(device)),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **packages,
    }


def report(title: str, rows: list[dict[str, Any]], device: str, out: Path | None) -> None:
    """Print rows with the same keys as a table; with `out`, also write them as a JSON file."""
    print_table(title, rows, environment(device))
    if out is not None:
        write(title, rows, device, out)


def print_table(title: str, rows: list[dict[str, Any]], facts: Mapping[str, str]) -> None:
    """Print rows with the same keys, if there are any, and the environment of their measurement."""
    if rows:
        table = Table(title=title)
        for key in rows[0]:
            table.add_column(key, justify="right")
        for row in rows:
            table.add_row(*(_shown(value) for value in row.values()))
        Console(width=120).print(table)
    print(", ".join(f"{key} {value}" for key, value in facts.items()))


def write(title: str, rows: list[dict[str, Any]], device: str, out: Path) -> None:
    """Write rows as a JSON file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    content = {"title": title, "facts": environment(device), "rows": rows}
    out.write_text(json.dumps(content, indent=1) + "\n")


def _shown(value: object) -> str:
    """A number with three significant digits, or as an integer from 100 up; "-" for None."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def report_queue(
    title: str,
    rows: int,
    max_batch: int,
    figures: Mapping[str, list[float]],
    device: str,
    out: Path | None,
) -> None:
    """`report` the medians of rows per second, "in-process" and through the "queue"."""
    ours, queue = median(figures["in-process"]), median(figures["queue"])
    row = {
        "rows": rows,
        "batch": max_batch,
        "in-process rows/s": ours,
        "queue rows/s": queue,
        "queue / in-process": queue / ours,
    }
    report(title, [row], device, out)
