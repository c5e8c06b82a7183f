"""Scores the samples of a run by a metric, and writes the table of its scores.

`score_run` does both. The rows of a metric that is computed elsewhere, such as by a judge, are
written by `write_rows`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from jobs.errors import invalid
from jobs.results.files import Results, write_scores
from jobs.results.scores import KEY, SCORES_SCHEMA, SCORES_VERSION
from jobs.scores.freshness import samples_digest
from jobs.scores.outcome import Row
from jobs.scores.pass_at_k import pass_at_k
from jobs.scores.pool import ScoringPool
from jobs.scores.process import Limits, Scoring
from jobs.scores.samples import sample_batches
from jobs.scores.spec import Spec
from jobs.scores.targets import TARGET_KEY, Targets

KEPT_ERRORS = 5  # that are quoted
ROW_GROUP = 20_000
MAX_PROCESSES = 8


@dataclass(slots=True)
class Tally:
    """The counts of one scoring of a run. `errors`: the first ones, with their rows."""

    rows: int = 0
    no_answer: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Count a row of the table."""
        self.rows += 1
        self.no_answer += row["status"] == "no_answer"
        if row["status"] == "error":
            self.failed += 1
            if len(self.errors) < KEPT_ERRORS:
                self.errors.append(f"row {row['row_index']}: {row['error']}")


def score_run(
    results: Results,
    run: str,
    spec: Spec,
    limits: Limits,
    *,
    targets: Targets | None = None,
    processes: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Tally:
    """Score each sample of a run, and replace the metric's file in `scores/` by the result.

    A row that the metric can't score has an error there. `targets`: instead of those of the run.
    `progress` gets the number of rows that are done. Raises InvalidRequest, before a row is scored,
    for a metric that can't be made and for a run that has nothing to score.
    """
    samples = samples_digest(results, run)
    if spec.samples is not None:
        rows = pass_at_k(results, run, spec)
    else:
        check_samples(results, run, spec, targets)
        count = processes or default_processes()
        rows = _scored_rows(results, run, spec, limits, count, targets)
    return write_rows(results, run, spec, rows, samples, progress=progress)


def write_rows(
    results: Results,
    run: str,
    spec: Spec,
    rows: Iterator[dict[str, Any]],
    samples: str,
    *,
    progress: Callable[[int], None] = lambda rows: None,
) -> Tally:
    """Replace the metric's file in `scores/` by rows of SCORES_SCHEMA, whose columns of the
    metric's name, versions and time are added. `samples`: digest of what was scored."""
    tally = Tally()
    started = {
        "schema_version": SCORES_VERSION,
        "metric": spec.text,
        "scorer_version": version(spec.kind.package or "chatjobs"),
        "created_at": datetime.now(UTC),
    }
    write_scores(results, run, spec.text, _tables(rows, started, tally, progress), samples)
    return tally


def default_processes() -> int:
    """As many as processors that this process may use, up to MAX_PROCESSES."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def check_samples(results: Results, run: str, spec: Spec, targets: Targets | None) -> None:
    """Raise InvalidRequest if no row of the run has what the metric needs. `targets`: instead of
    those of the run."""
    import pyarrow.compute as pc

    rows = results.dataset(run)
    if not rows.count_rows():
        raise invalid(f"run {run} has no rows", "run")
    if not rows.count_rows(filter=pc.field("status") == "ok"):
        raise invalid(f"no row of run {run} has an answer: all of its jobs failed", "run")
    needed = spec.kind.target and targets is None
    if needed and not rows.count_rows(filter=pc.field("target").is_valid()):
        raise invalid(
            f"no row of run {run} has a target, which {spec.text} compares with: give a file that "
            "has them with chatjobs score --target FILE",
            "metric",
        )
    if spec.kind.figure == "perplexity" and not rows.count_rows(
        filter=pc.field("logprob_sum").is_valid()
    ):
        raise invalid(
            f"no row of run {run} has log-probabilities, which {spec.text} is made of: run the "
            "data set with -o logprobs=true, or with --mode perplexity",
            "metric",
        )


def _scored_rows(
    results: Results,
    run: str,
    spec: Spec,
    limits: Limits,
    processes: int,
    targets: Targets | None,
) -> Iterator[dict[str, Any]]:
    """The rows of the table: the keys of the samples and what the metric says of them."""
    kind = spec.kind
    columns = list(dict.fromkeys([*KEY, "model", "status", *kind.columns, *TARGET_KEY]))

    def chunks() -> Iterator[tuple[Sequence[Row], Sequence[Row]]]:
        for rows in sample_batches(results, run, columns):
            if targets is not None:
                rows = [{**row, "target": targets.of(row)} for row in rows]
            yield rows, [_arguments(row, kind.columns) for row in rows if _answered(row, spec)]

    with ScoringPool(spec, limits, processes) as pool:
        for rows, scorings in pool.map(chunks()):
            left = iter(scorings)
            for row in rows:
                scoring = next(left) if _answered(row, spec) else None
                yield {
                    "run_id": run,
                    "model": row["model"],
                    **{name: row[name] for name in KEY},
                    **_columns(scoring),
                }


def _answered(row: Row, spec: Spec) -> bool:
    """True if there is something to score."""
    return row["status"] == "ok" and not (spec.kind.text and row["text"] is None)


def _arguments(row: Row, columns: Sequence[str]) -> Row:
    return {name: row[name] for name in columns}


def _columns(scoring: Scoring | None) -> dict[str, Any]:
    if scoring is None:
        return {"status": "no_answer"}
    if scoring.outcome is None:
        return {"status": "error", "error": scoring.error}
    one = scoring.outcome
    return {
        "status": "ok",
        "value": one.value,
        "label": one.label,
        "answer": one.answer,
        "explanation": one.explanation,
        "statistics": one.statistics,
    }


def _tables(
    rows: Iterator[dict[str, Any]],
    started: dict[str, Any],
    tally: Tally,
    progress: Callable[[int], None],
) -> Iterator[pa.Table]:
    kept: list[dict[str, Any]] = []
    for row in rows:
        tally.add(row)
        progress(tally.rows)
        kept.append({**started, **row})
        if len(kept) >= ROW_GROUP:
            yield pa.Table.from_pylist(kept, SCORES_SCHEMA)
            kept = []
    yield pa.Table.from_pylist(kept, SCORES_SCHEMA)
