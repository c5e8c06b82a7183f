"""The work of a draft model in one step, and its result, as picklable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from worker.cache.changes import CacheChange
from worker.layers.batch import Span


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Changes of the caches, then as many forward passes of the draft model as the longest draft
    has tokens. `spans`: the tokens of each sequence that the draft has not computed; `lengths`: how
    many tokens it proposes after them. A span that starts at 0 is a new sequence."""

    changes: tuple[CacheChange, ...]
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]


class Proposed(NamedTuple):
    """The draft after one span. If `finite` is False, there were logits that are not, there is no
    draft, and the draft's caches of the slot are empty."""

    token_ids: list[int]
    finite: bool = True
