"""Runs on disk for reports: rows with times and tokens, and scores without scoring them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from jobs import Results
from jobs.results.files import write_scores
from jobs.results.run_json import RunJson
from jobs.results.scores import SCORES_SCHEMA
from tests.jobs.scores.runs import make_run

START = datetime(2026, 1, 2, 9, 0, tzinfo=UTC)


def timed(start: float, seconds: float, **row: Any) -> dict[str, Any]:
    """A row that ran from `start`, in seconds."""
    began, ended = (START + timedelta(seconds=one) for one in (start, start + seconds))
    return {
        "started_at": began,
        "finished_at": ended,
        "duration_s": seconds,
        "ttft_s": seconds / 4,
        "queue_s": 0.5,
        "worker_id": "w",
        "input_tokens": 20,
        "output_tokens": 10,
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "text": "5",
        **row,
    }


def failed(code: str, message: str, **row: Any) -> dict[str, Any]:
    """A row of a job that failed before it was started."""
    return {"status": "error", "error_type": code, "error_message": message, **row}


def scored(root: Path, run: str, metric: str, values: list[float]) -> None:
    """Write scores of the rows of a run, in their order."""
    rows = [
        {
            "schema_version": 1,
            "run_id": run,
            "model": "demo",
            "row_index": index,
            "repeat_index": 0,
            "choice_index": 0,
            "metric": metric,
            "status": "ok",
            "value": value,
            "scorer_version": "1",
            "created_at": START,
        }
        for index, value in enumerate(values)
    ]
    table = pa.Table.from_pylist(rows, schema=SCORES_SCHEMA)
    write_scores(Results(root), run, metric, [table])


def large_run(root: Path, run: str, rows: int = 40, **more: Any) -> None:
    """A run with enough rows for charts, made by `chatjobs run`, with scores."""
    make_run(
        root,
        [
            timed(
                index / 2,
                0.5 + index / 10,
                output_tokens=3 + index,
                metadata=json.dumps({"level": "easy" if index % 2 else "hard"}),
                tpot_s=0.01 + index / 1000,
                **more,
            )
            for index in range(rows)
        ],
        run,
    )
    noted(root, run, rows_in=rows)
    scored(root, run, "exact", [index % 3 / 2 for index in range(rows)])


def noted(root: Path, run: str, rows_in: int, **configuration: Any) -> None:
    """run.json as `chatjobs run` leaves it."""
    content: Mapping[str, Any] = {
        "run_id": run,
        "state": "done",
        "configuration": {"model": "demo", "options": {"temperature": 0}, **configuration},
        "audit": {"rows_in": rows_in, "samples": 1},
    }
    RunJson(dict(content)).write(root / run)
