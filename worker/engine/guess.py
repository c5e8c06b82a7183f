"""Tokens that a draft proposes for one sequence."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from worker.engine.rollback import Undo
from worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Guess:
    """The tokens after a sequence's last one. `undo`: takes back what the draft computed of them,
    if it has caches; `known`: tokens of the sequence that the caches held before."""

    token_ids: list[int]
    known: int = 0
    undo: Undo | None = None

    def settle(self, sequence: Sequence, accepted: int) -> None:
        """Bring the draft's caches to the sequence after `accepted` of the tokens were right."""
        if self.undo is not None:
            kept = self.known + min(accepted, len(self.token_ids) - 1)
            sequence.draft_computed = self.undo.back_to(kept)


class Draft(Protocol):
    """Proposes tokens. Used by the thread that steps the engine. `start`: the share of its guesses
    that is assumed to be right before it is known."""

    start: float

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> dict[Sequence, Guess]:
        """Tokens for the sequences, up to a number each; a sequence may be left out."""
