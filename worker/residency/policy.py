"""The wishes of an operator for a model: when it is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from jobs.errors import invalid

DURATION_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyPolicy:
    """The wishes of an operator for one model."""

    pin: bool = False  # always in memory: loaded at the start, never unloaded
    preload: bool = True  # loaded at the start, if there is room
    keep_alive: float = inf  # seconds without jobs after which it is unloaded


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
