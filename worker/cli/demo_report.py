"""Print what the demo's Parquet rows contain: accuracy per task, throughput, files."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.compute as pc
from rich import box
from rich.console import Console
from rich.table import Table

from jobs.cli.answer import counted
from jobs.results.files import SAMPLES


def print_accuracy(rows: pa.Table) -> None:
    """Print the accuracy per task. An answer is right if it equals the target."""
    by_task: dict[str, list[bool]] = {}
    for row in rows.select(["metadata", "text", "target"]).to_pylist():
        task = json.loads(row["metadata"])["task"]
        by_task.setdefault(task, []).append((row["text"] or "").strip() == row["target"])
    table = Table("task", box=box.SIMPLE)
    for name in ("rows", "right", "accuracy"):
        table.add_column(name, justify="right")
    for task, right in sorted(by_task.items()):
        table.add_row(task, *_cells(right))
    table.add_section()
    table.add_row("all", *_cells([is_right for right in by_task.values() for is_right in right]))
    Console().print(table)


def _cells(right: list[bool]) -> tuple[str, str, str]:
    return str(len(right)), str(sum(right)), f"{sum(right) / len(right):.1%}"


def print_throughput(rows: pa.Table, folder: Path) -> None:
    """Print tokens per second, from the first start to the last end, how often the draft was right,
    and the run's files."""
    tokens = pc.sum(rows.column("output_tokens")).as_py()
    started = pc.min(rows.column("started_at")).as_py()
    seconds = (pc.max(rows.column("finished_at")).as_py() - started).total_seconds()
    drafted, accepted = (
        pc.sum(rows.column(name)).as_py() or 0 for name in ("drafted_tokens", "accepted_tokens")
    )
    if drafted:
        click.echo(f"draft: {accepted:,} of {drafted:,} tokens accepted")
    files = len(list((folder / SAMPLES).glob("*.parquet")))
    click.echo(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
    where = f"{counted(rows.num_rows, 'row')} in {counted(files, 'file')}"
    click.echo(f"{where}: {folder / SAMPLES}\n")
