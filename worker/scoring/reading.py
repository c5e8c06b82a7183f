"""Readers of the logits of targets, which keep nine bytes of each target.

A text may have millions of tokens, so nothing else that the engine knows of a position stays.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from worker.sampling.prompt_logits import Found, NextTokenLogprobs, PromptLogprobs, TokenScore
from worker.scoring.encoding import Targets


class TargetScores:
    """Of each target that was read, its log-probability, and 1 if it was the most probable token,
    else 0."""

    def __init__(self) -> None:
        self.logprobs, self.greedy = array("d"), bytearray()

    def take(self, positions: list[list[TokenScore]]) -> None:
        """Add the scores of further positions, and remove them from the list."""
        self.logprobs.extend([scores[0].logprob for scores in positions])
        self.greedy.extend([scores[0].rank == 1 for scores in positions])
        positions.clear()


class ContinuationReader(PromptLogprobs):
    """Reads the targets of one continuation or window."""

    def __init__(self, targets: Targets) -> None:
        super().__init__(targets.token_ids, 0, first=targets.first)
        self.scores = TargetScores()

    def add(self, found: Found) -> None:
        super().add(found)
        self.scores.take(self.positions)


class NextTokenReader(NextTokenLogprobs):
    """Reads several continuations of one token behind one prompt of so many tokens."""

    def __init__(self, tokens: int, token_ids: Sequence[int]) -> None:
        super().__init__(tokens, token_ids)
        self.scores = TargetScores()

    def add(self, found: Found) -> None:
        super().add(found)
        self.scores.take(self.positions)
