"""The runs of a folder in the order in which they were written."""

from __future__ import annotations

from jobs.results.files import SAMPLES, Results


def newest_runs(results: Results) -> list[str]:
    """Names of the runs, beginning with the one to which a file was added last."""
    return sorted(results.runs(), key=lambda run: written_at(results, run), reverse=True)


def written_at(results: Results, run: str) -> float:
    """When a file was last added to a run, or removed; 0 if it has none."""
    try:
        return (results.root / run / SAMPLES).stat().st_mtime
    except OSError:
        return 0.0
