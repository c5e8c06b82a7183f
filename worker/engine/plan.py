"""The work of a device in one step, as picklable values that are made of numbers."""

from __future__ import annotations

from dataclasses import dataclass

from worker.cache.changes import CacheChange
from worker.layers.batch import Span


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Changes of the caches, then one forward pass. The spans are in `row_order`; the last tokens
    of a span may be a draft's. A plan without spans has changes only."""

    changes: tuple[CacheChange, ...]
    spans: tuple[Span, ...]
