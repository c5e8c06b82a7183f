"""Removes a run from the folder of runs."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress

from jobs.results.files import Results

REMOVED = ".removed-"  # begins the names of folders of runs that are being removed: no reader looks


def remove_run(results: Results, run: str) -> None:
    """Remove the folder of a run, with its rows and scores. In one step for readers: it is moved
    aside first. What a killed call has left aside is removed as well.

    Raises InvalidRequest if there is no such run, and OSError.
    """
    results.path(run).rename(results.root / f"{REMOVED}{uuid.uuid4().hex}")
    for removed in results.root.glob(f"{REMOVED}*"):
        with suppress(FileNotFoundError):  # another call removes it, too
            shutil.rmtree(removed)
