"""Drafts without a model: proposes the tokens that followed the same tokens earlier in the text."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from worker.speculative.proposer import NO_DRAFT, Draft, DraftedSequence

LONGEST, SHORTEST = 3, 2  # tokens that are looked up


class Lookup:
    """The last position of each run of tokens in one sequence."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # leading tokens after which all runs are known

    def following(self, ids: Sequence[int], number: int) -> list[int]:
        """The tokens that followed the longest known run at the end of `ids`, up to `number`."""
        for end in range(self._indexed + 1, len(ids)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._ends[tuple(ids[end - size : end])] = end
        self._indexed = max(self._indexed, len(ids) - 1)
        for size in range(min(LONGEST, len(ids)), SHORTEST - 1, -1):
            known = self._ends.get(tuple(ids[-size:]))
            if known is not None:
                found = list(ids[known : known + number])
                period = len(ids) - known
                while len(found) < number:  # the run repeats itself
                    found.append(found[-period])
                return found
        return []


class NgramProposer:
    """Proposes by `Lookup`. Belongs to the thread that steps the engine."""

    start = 0.6  # short drafts at first: most texts repeat little

    def __init__(self) -> None:
        self._lookups: WeakKeyDictionary[DraftedSequence, Lookup] = WeakKeyDictionary()

    def propose(self, wanted: Sequence[tuple[DraftedSequence, int]]) -> list[Draft]:
        """Implements `Proposer`."""
        drafts = []
        for sequence, number in wanted:
            lookup = self._lookups.setdefault(sequence, Lookup())
            found = lookup.following(sequence.tokens(0, sequence.length), number)
            drafts.append(Draft(found) if found else NO_DRAFT)
        return drafts
