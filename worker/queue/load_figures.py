"""The figures of the loads of models. Their owner makes them: worker/residency/executor.py, or the
service for models that are loaded at the start and stay."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Counts since the start. The attributes are read by /metrics and /readyz."""

    loads: int = 0  # models loaded
    evictions: int = 0  # models unloaded, for whatever reason
    swaps: int = 0  # loads for which another model was unloaded
    blocked_seconds: float = 0.0  # that the load in progress has taken or waited; 0 without one
    overdue: str = ""  # a sentence about a load that takes longer than it may; "" without one
