"""The interface between the scheduler and what proposes drafts: the n-gram lookup, or a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.sampling.inputs import SamplingInput
from worker.speculative.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come after a sequence's last one. A draft model has caches: it computed
    the `known` tokens of the sequence and its own up to position `end`. `forced`: by the grammar of
    the sequence, and not proposed."""

    token_ids: Sequence[int]
    known: int | None = None
    end: int = 0
    forced: bool = False


NO_DRAFT = Draft(())


class DraftedSequence(Protocol):
    """A sequence as proposers know it. `draft_computed`: number of its tokens in the caches of the
    draft model, which the proposer keeps."""

    acceptance: Acceptance
    draft_computed: int

    @property
    def slot(self) -> int | None: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> SamplingInput | None: ...
    @property
    def length(self) -> int: ...
    def tokens(self, start: int, end: int) -> list[int]: ...


class Proposer(Protocol):
    """Proposes tokens. Used by the thread that steps the engine. `start`: the share of its tokens
    that is assumed to be right before it is known."""

    start: float

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """A draft for each sequence, up to a number of tokens; NO_DRAFT if there is none."""
