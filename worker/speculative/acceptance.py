"""The acceptance rate of one sequence's drafts, and the number of tokens to draft for it next."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.1  # of one drafted token in the rate
WORTH = 0.4  # probability of acceptance from which on a token is drafted
FIRST_SEQUENCE_PAUSE, LONGEST_SEQUENCE_PAUSE = 16, 256  # steps until the next probe
PROBE_TOKENS = 2  # drafted in a probe


@dataclass(slots=True)
class Acceptance:
    """`rate`: estimated probability that a drafted token is accepted if all before it are; at first
    that of the draft."""

    rate: float | None = None
    steps: int = 0  # in which drafts were verified
    drafted: int = 0
    accepted: int = 0
    off: bool = False  # the draft has failed, or does not have one of the tokens
    _pause: int = FIRST_SEQUENCE_PAUSE
    _left: int = 0  # steps of the pause that are left

    def length(self, most: int, start: float) -> int:
        """Number of tokens to draft in the next step. `start`: the rate of a new sequence."""
        if self.off:
            return 0
        if self.rate is None:
            self.rate = start
        if self._left:
            self._left -= 1
            return 0 if self._left else min(PROBE_TOKENS, most)
        number, probability = 0, self.rate
        while number < most and probability >= WORTH:
            number += 1
            probability *= self.rate
        if not number:
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_SEQUENCE_PAUSE)
        return number

    def add(self, drafted: int, accepted: int) -> None:
        """Count one step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        assert self.rate is not None
        self.rate = updated(self.rate, drafted, accepted, WEIGHT)
        if self.rate >= WORTH:
            self._pause = FIRST_SEQUENCE_PAUSE


def updated(rate: float, drafted: int, accepted: int, weight: float) -> float:
    """A running average of acceptance after a step; nothing is known of the tokens after the first
    wrong one."""
    for _ in range(accepted):
        rate += weight * (1 - rate)
    return rate - weight * rate if accepted < drafted else rate
