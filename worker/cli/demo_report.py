"""The report of a demo run: accuracy per task from its scores, throughput and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jobs import Results
from jobs.cli.output import echo
from jobs.cli.table import number, print_table
from jobs.results.files import SAMPLES
from jobs.scores.figures import Interval
from jobs.scores.samples import read_groups
from jobs.scores.spec import Spec
from jobs.scores.summary import Summary, summarise
from jobs.sizes import counted, figure_text, interval_text

TASK = "task"  # the field of the metadata


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The part of some rows that are right."""

    rows: int
    right: int
    interval: Interval | None  # of 95 %; None for one row


@dataclass(frozen=True, slots=True)
class Report:
    """The totals of a run's rows."""

    all: Accuracy
    tasks: dict[str, Accuracy]
    tokens: int
    seconds: float  # from the first start to the last end
    drafted: int
    accepted: int
    files: int
    samples: Path

    def facts(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "rows": self.all.rows,
            "right": self.all.right,
            "tasks": {
                name: {"rows": one.rows, "right": one.right} for name, one in self.tasks.items()
            },
            "output_tokens": self.tokens,
            "seconds": self.seconds,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "files": self.files,
            "samples": str(self.samples),
        }


def report_of(results: Results, run: str, metric: Spec) -> Report:
    """Read the rows of a run, and its scores by a metric that is 0 or 1."""
    groups = read_groups(results, run, [TASK])
    total, *by_task = summarise(results, run, [metric], groups)
    rows = results.table(run)
    started = pc.min(rows.column("started_at")).as_py()
    samples = results.root / run / SAMPLES
    return Report(
        all=_accuracy(total),
        tasks={one.group[TASK] or "": _accuracy(one) for one in by_task},
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
        (TASK, number("rows"), number("right"), number("accuracy"), number("95% interval")),
        [
            (
                name,
                one.rows,
                one.right,
                figure_text(one.right / one.rows),
                interval_text(one.interval),
            )
            for name, one in (*report.tasks.items(), ("all", report.all))
        ],
    )
    if report.drafted:
        echo(f"draft: {report.accepted:,} of {report.drafted:,} tokens accepted")
    speed = report.tokens / report.seconds
    echo(f"{report.tokens:,} tokens in {report.seconds:.1f} s: {speed:,.0f} tokens/s")
    where = f"{counted(report.all.rows, 'row')} in {counted(report.files, 'file')}"
    echo(f"{where}: {report.samples}\n")


def _accuracy(one: Summary) -> Accuracy:
    figure = one.figure
    right = round((figure.value or 0.0) * figure.scored)
    return Accuracy(figure.rows, right, figure.interval)


def _sum(rows: pa.Table, column: str) -> int:
    return pc.sum(rows.column(column)).as_py() or 0
