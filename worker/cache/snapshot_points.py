"""Chooses the prompt positions at which state snapshots are taken during prefill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SnapshotPoints:
    """Numbers of leading tokens, ascending. `provisional`: those of which it is not known whether
    other prompts part there."""

    ends: SequenceOf[int] = ()
    provisional: frozenset[int] = frozenset()

    @classmethod
    def plan(
        cls, begin: int, last: int, parting: Iterable[int], *, grid: int, spacing: int
    ) -> SnapshotPoints:
        """The positions in a prompt of which `begin` tokens are kept: `last`, the positions
        `parting` at which other prompts part from it, and spaced ones after these. All are
        multiples of `grid`."""
        known = {min(end, last) // grid * grid for end in parting}
        wanted = {end for end in known | {last} if end > begin}
        spaced = {*spaced_points(max({begin, *known}), last, spacing)} - wanted
        return cls(sorted(wanted | spaced), frozenset(spaced))

    def after(self, start: int) -> int | None:
        """The first one after `start` tokens."""
        at = bisect_right(self.ends, start)
        return self.ends[at] if at < len(self.ends) else None

    def until(self, end: int) -> int:
        """The last one of at most `end` tokens, or 0."""
        at = bisect_right(self.ends, end)
        return self.ends[at - 1] if at else 0


def spaced_points(begin: int, last: int, first: int) -> Iterator[int]:
    """Each power of two times `first` tokens between `begin` and `last`: the same places in all
    prompts, few in long ones, and one in the second half of any longer beginning that two prompts
    have in common.

    Prefill is cut there, so each is at least half of `first` away from where it is cut anyway.
    """
    point, least = first, first // 2
    while point + least <= last:
        if point >= begin + least:
            yield point
        point *= 2
