"""The states of a model in a worker. worker/queue/served.py owns the state of each model."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """cold → loading → ready → draining → unloaded → loading. A load that fails leads back to cold
    or unloaded; a model that drains is ready again if its memory is not needed any more."""

    COLD = "cold"  # not loaded yet in this process
    LOADING = "loading"  # takes no jobs yet; its memory is taken
    READY = "ready"  # takes jobs
    DRAINING = "draining"  # takes no more jobs; those that run go on
    UNLOADED = "unloaded"  # was loaded; its memory is free

    @property
    def resident(self) -> bool:
        """True if the model takes memory."""
        return self in (State.LOADING, State.READY, State.DRAINING)
