"""How well the drafts of one sequence have done, and how many tokens to draft for it next."""

from __future__ import annotations

from dataclasses import dataclass

START = 0.8  # assumed rate of a new sequence
WEIGHT = 0.1  # of one drafted token in the rate
WORTH = 0.4  # probability of acceptance from which on a token is drafted
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # steps until drafting is tried again
TRIED = 2  # tokens that are drafted then


@dataclass(slots=True)
class Acceptance:
    """`rate`: estimated probability that a drafted token is accepted if all before it are."""

    rate: float = START
    steps: int = 0  # in which drafts were verified
    drafted: int = 0
    accepted: int = 0
    paused: bool = False  # drafting costs more than it gives in the batch as it is now
    off: bool = False  # the draft has failed
    _pause: int = FIRST_PAUSE
    _left: int = 0  # steps of the pause that are left

    def length(self, most: int) -> int:
        """Number of tokens to draft in the next step."""
        if self.off:
            return 0
        if self._left:
            self._left -= 1
            return 0 if self._left else min(TRIED, most)
        number, probability = 0, self.rate
        while number < most and probability >= WORTH:
            number += 1
            probability *= self.rate
        if not number:
            self._left, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return number

    def expected(self, number: int) -> float:
        """How many of that many drafted tokens will be accepted."""
        return sum(self.rate**place for place in range(1, number + 1))

    def add(self, drafted: int, accepted: int) -> None:
        """Count one step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        for _ in range(accepted):
            self.rate += WEIGHT * (1 - self.rate)
        if accepted < drafted:
            self.rate -= WEIGHT * self.rate
        if self.rate >= WORTH:
            self._pause = FIRST_PAUSE
