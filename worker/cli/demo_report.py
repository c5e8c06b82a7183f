"""The report of a demo run, from its Parquet rows: accuracy per task, throughput, files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs.cli.output import echo
from jobs.cli.table import number, print_table
from jobs.results.files import SAMPLES
from jobs.sizes import counted


@dataclass(frozen=True, slots=True)
class Report:
    """The totals of a run's rows. `tasks`: rows and right answers by task."""

    tasks: dict[str, tuple[int, int]]
    tokens: int
    seconds: float  # from the first start to the last end
    drafted: int
    accepted: int
    files: int
    samples: Path

    @property
    def all(self) -> tuple[int, int]:
        """Rows and right answers."""
        counts = self.tasks.values()
        return sum(rows for rows, _ in counts), sum(right for _, right in counts)

    def facts(self) -> dict[str, Any]:
        """The report as JSON."""
        rows, right = self.all
        return {
            "rows": rows,
            "right": right,
            "tasks": {
                name: {"rows": rows, "right": right} for name, (rows, right) in self.tasks.items()
            },
            "output_tokens": self.tokens,
            "seconds": self.seconds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "files": self.files,
            "samples": str(self.samples),
        }


def report_of(rows: pa.Table, folder: Path) -> Report:
    """Read the rows of the run in `folder`. An answer is right if it equals the target."""
    by_task: dict[str, list[bool]] = {}
    for row in rows.select(["metadata", "text", "target"]).to_pylist():
        task = json.loads(row["metadata"])["task"]
        by_task.setdefault(task, []).append((row["text"] or "").strip() == row["target"])
    started = pc.min(rows.column("started_at")).as_py()
    samples = folder / SAMPLES
    return Report(
        tasks={name: (len(right), sum(right)) for name, right in sorted(by_task.items())},
        tokens=_sum(rows, "output_tokens"),
        seconds=(pc.max(rows.column("finished_at")).as_py() - started).total_seconds(),
        drafted=_sum(rows, "drafted_tokens"),
        accepted=_sum(rows, "accepted_tokens"),
        files=len(list(samples.glob("*.parquet"))),
        samples=samples,
    )


def print_report(report: Report) -> None:
    """Print the accuracy per task, how often the draft was right, tokens per second and files."""
    print_table(
        ("task", number("rows"), number("right"), number("accuracy")),
        [
            (name, rows, right, f"{right / rows:.1%}")
            for name, (rows, right) in (*report.tasks.items(), ("all", report.all))
        ],
    )
    if report.drafted:
        echo(f"draft: {report.accepted:,} of {report.drafted:,} tokens accepted")
    speed = report.tokens / report.seconds
    echo(f"{report.tokens:,} tokens in {report.seconds:.1f} s: {speed:,.0f} tokens/s")
    where = f"{counted(report.all[0], 'row')} in {counted(report.files, 'file')}"
    echo(f"{where}: {report.samples}\n")


def _sum(rows: pa.Table, column: str) -> int:
    return pc.sum(rows.column(column)).as_py() or 0
