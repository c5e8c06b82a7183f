"""The folder of runs that a command reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.cli.failures import WrongInput

if TYPE_CHECKING:
    from jobs import Results


def open_results(folder: str) -> Results:
    """The folder of runs. Raises WrongInput if there is none."""
    from jobs import Results

    store = Results(folder)
    if not store.root.is_dir():
        raise WrongInput(
            f"no folder {store.root.absolute()}: run this where a worker has written its "
            "results, or select their folder with --results DIR"
        )
    return store
