"""Runs on disk with the answers and targets that a test needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import Results
from jobs.results.files import table_of, write_tables
from jobs.results.run_json import RunJson


def make_run(root: Path, rows: Sequence[dict[str, Any]], run: str = "r1") -> Results:
    """A run with these rows; columns that a row must have are filled in."""
    filled = [
        {
            "schema_version": 1,
            "run_id": run,
            "job_id": f"{run}-{index}",
            "row_index": index,
            "repeat_index": 0,
            "choice_index": 0,
            "attempt": 1,
            "request_hash": f"h{index}",
            "operation": "chat",
            "status": "ok",
            "model": "demo",
            **row,
        }
        for index, row in enumerate(rows)
    ]
    folder = root / run
    write_tables(folder / "_tmp/a", folder / "samples/part-a.parquet", [table_of(filled)])
    RunJson({"run_id": run}).write(folder)
    return Results(root)


def answers(*pairs: tuple[str | None, str | None]) -> list[dict[str, Any]]:
    """Rows of (text, target); a text of None is that of a failed job."""
    return [
        {"text": text, "target": target, "status": "error" if text is None else "ok"}
        for text, target in pairs
    ]
