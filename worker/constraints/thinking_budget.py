"""The budget of a completion's reasoning: when it is used up, the mark that ends it is forced.

Where reasoning begins and ends is what the reader of the answer finds. The marks are not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from worker.text.reasoning import Splitter

FIELD = "thinking_token_budget"


@dataclass(frozen=True, eq=False)
class ThinkingBudget:
    """Of a request. `most`: tokens of reasoning. `mark`: the tokens that end it. `splitter`: at the
    beginning of a completion. `text_of`: the text of a token."""

    most: int
    mark: tuple[int, ...]
    splitter: Splitter
    text_of: Callable[[int], str]

    def count(self) -> ThinkingCount:
        """The state of one sequence."""
        return ThinkingCount(self)


class _State(NamedTuple):
    """After some tokens: `reasoned` of them are reasoning, `marked` are of the forced mark."""

    splitter: Splitter
    reasoned: int = 0
    marked: int = 0


class ThinkingCount:
    """The state of a budget, which follows the tokens of one output. Belongs to the thread that
    steps the engine. Its forced tokens are never taken back."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._states = [_State(budget.splitter)]  # the last ones, back to the last forced token
        self._over = 0  # tokens after the end of the reasoning

    @property
    def room(self) -> int | None:
        """Least number of tokens that come before one is forced; None if none is forced."""
        last = self._states[-1]
        if last.splitter.finished or last.marked == len(self._budget.mark):
            return None
        if last.marked:
            return 0
        # Outside, a further token begins the reasoning.
        return max(0, self._budget.most - last.reasoned) + (not last.splitter.inside)

    @property
    def forced(self) -> int | None:
        """The next token, if it is forced."""
        return self._budget.mark[self._states[-1].marked] if self.room == 0 else None

    def advance(self, token_id: int) -> None:
        """Add a token to the output."""
        last, forced = self._states[-1], self.forced
        if forced is not None:
            self._states = [last._replace(marked=last.marked + 1)]
        elif self.room is None:
            self._over += 1
        else:
            splitter = copy.copy(last.splitter)
            splitter.push(self._budget.text_of(token_id))
            counts = last.splitter.inside and splitter.inside
            self._states.append(_State(splitter, last.reasoned + counts))

    def rollback(self, count: int) -> None:
        """Take the last tokens back."""
        over = min(count, self._over)
        self._over -= over
        if count > over:
            del self._states[over - count :]
