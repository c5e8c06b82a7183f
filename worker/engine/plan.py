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


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Changes of the caches, then as many forward passes of the draft model as the longest draft
    has tokens. `spans`: the tokens of each sequence that the draft has not computed; `lengths`: how
    many tokens it proposes after them. A span that starts at 0 is a new sequence."""

    changes: tuple[CacheChange, ...]
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]
