"""Print what the demo's Parquet rows contain: accuracy per task, throughput, files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from jobs.cli.answer import counted
from jobs.cli.output import echo
from jobs.cli.table import number, print_table
from jobs.results.files import SAMPLES


def print_accuracy(rows: pa.Table) -> None:
    """Print the accuracy per task. An answer is right if it equals the target."""
    by_task: dict[str, list[bool]] = {}
    for row in rows.select(["metadata", "text", "target"]).to_pylist():
        task = json.loads(row["metadata"])["task"]
        by_task.setdefault(task, []).append((row["text"] or "").strip() == row["target"])
    every = [is_right for right in by_task.values() for is_right in right]
    rows = [(name, *_cells(right)) for name, right in (*sorted(by_task.items()), ("all", every))]
    print_table(("task", number("rows"), number("right"), number("accuracy")), rows)


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
        echo(f"draft: {accepted:,} of {drafted:,} tokens accepted")
    files = len(list((folder / SAMPLES).glob("*.parquet")))
    echo(f"{tokens:,} tokens in {seconds:.1f} s: {tokens / seconds:,.0f} tokens/s")
    where = f"{counted(rows.num_rows, 'row')} in {counted(files, 'file')}"
    echo(f"{where}: {folder / SAMPLES}\n")
