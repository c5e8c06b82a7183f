"""Removes a run from the folder of runs."""

from __future__ import annotations

import shutil
import uuid

from jobs.results.files import Results

REMOVED = ".removed"  # folder of runs that are being removed, which no reader looks into


def remove_run(results: Results, run: str) -> None:
    """Remove the folder of a run, with its rows and scores. In one step for readers: it is moved
    aside first. What a killed call has left there is removed as well.

    Raises InvalidRequest if there is no such run, and OSError.
    """
    folder, aside = results.path(run), results.root / REMOVED
    aside.mkdir(exist_ok=True)
    folder.rename(aside / f"{run}-{uuid.uuid4().hex}")
    shutil.rmtree(aside)
