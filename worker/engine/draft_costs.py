"""What drafting costs at each size of the batch, measured while the engine runs."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

SAMPLES = 5  # of the last ones, the mean without the least and the greatest counts
ENOUGH = 3  # samples before decisions are made
REFRESH, LONGEST = 128, 2048  # steps until a step of the kind that was not used is measured again
GO_ON, START_AGAIN = 1.1, 1.3  # what guesses must save for each second that they cost


@dataclass(slots=True)
class Measured:
    """The last samples of one figure, in seconds."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    age: int = 0  # steps since the last one
    patience: int = REFRESH

    @property
    def due(self) -> bool:
        return len(self.samples) < ENOUGH or self.age >= self.patience

    @property
    def seconds(self) -> float:
        return fmean(sorted(self.samples)[1:-1])

    def add(self, seconds: float) -> None:
        self.samples.append(seconds)
        self.age = 0


@dataclass(slots=True)
class Costs:
    """Of batches of similar size."""

    step: Measured = field(default_factory=Measured)  # without guesses
    token: Measured = field(default_factory=Measured)  # additional, per guessed token


class DraftCosts:
    """Compares the time that guesses save with what they take. Sizes of batches are taken together
    by powers of two. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._costs: defaultdict[int, Costs] = defaultdict(Costs)
        self._began, self._drawing, self._whole = 0.0, 0, False

    def begin(self, drawing: int, *, whole: bool) -> bool | None:
        """A step begins in which so many sequences draw a token; `whole`: and there are no
        others. Returns whether it has guesses if it is one to measure, else None."""
        self._began, self._drawing, self._whole = self._clock(), drawing, whole
        costs = self._costs[drawing.bit_length()]
        if costs.step.due:
            return False
        return True if costs.token.due else None

    def worth(self, expected: float, number: int, *, paused: bool) -> bool:
        """Whether a guess of `number` tokens, of which so many are expected to be right, saves
        time in this step."""
        costs = self._costs[self._drawing.bit_length()]
        saved = expected * costs.step.seconds / self._drawing
        if saved <= number * costs.token.seconds * (START_AGAIN if paused else GO_ON):
            return False
        costs.token.patience = REFRESH
        return True

    def end(self, guessed: int) -> None:
        """The step ends; it computed so many guessed tokens."""
        if not self._whole:
            return
        costs, seconds = self._costs[self._drawing.bit_length()], self._clock() - self._began
        if not guessed:
            costs.step.add(seconds)
            costs.token.age += 1
        elif costs.step.samples:
            if costs.token.age >= costs.token.patience:
                costs.token.patience = min(2 * costs.token.patience, LONGEST)
            costs.token.add((seconds - costs.step.seconds) / guessed)
            costs.step.age += 1
