"""The states of a model in a worker, and what a plan needs to know of one model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from jobs.errors import invalid

DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """The wishes of an operator for one model."""

    pin: bool = False  # always in memory: loaded at the start, never unloaded
    preload: bool = True  # loaded at the start, if there is room
    keep_alive: float = inf  # seconds without jobs after which it is unloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model at the time of a plan. Times are in seconds."""

    name: str
    nbytes: int  # its share of the budget
    state: State
    pinned: bool = False
    keep_alive: float = inf
    queued: int = 0  # jobs in its queues
    oldest: float = 0.0  # how long the first of them has waited
    running: int = 0  # jobs here
    load_seconds: float = 1.0  # of its last load, else an estimate
    since: float = inf  # resident: since it was loaded; else: since it was unloaded
    idle: float = 0.0  # since its last job ended
    may_load: bool = True  # False after a load that failed, or while another worker loads it
    elsewhere: bool = False  # another worker takes its jobs

    @property
    def busy(self) -> bool:
        return bool(self.queued or self.running)

    @property
    def waits(self) -> float:
        """How long its first job has waited for the model: time in which the model was in memory is
        time in which the job waited for other jobs."""
        return min(self.oldest, self.since)


def keep_alive_seconds(value: float | str) -> float:
    """Ollama's values: seconds, or a text such as "5m"; a negative one is for ever. Raises JobError
    ("invalid_request")."""
    if isinstance(value, str):
        number = value.rstrip("smh")
        unit = value[len(number) :]
        try:
            seconds = float(number) * DURATION_UNITS[unit]
        except (ValueError, KeyError):
            seconds = float("nan")
    else:
        seconds = float(value)
    if seconds != seconds:
        raise invalid(
            f"keep_alive {value!r}: give seconds, a time such as '5m', 0 to unload a model at once "
            "or -1 to keep it",
            "keep_alive",
        )
    return inf if seconds < 0 else seconds
