"""Packs what is scored into jobs: items that are next to each other share one, within limits.

The producer of a run packs its rows (`jobs/runs/packs.py`), and callers that score many items these
(`jobs/client/in_flight.py`); each has its own limits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PackLimits:
    """Of one job. sequences: continuations and windows, about. characters: of its items as JSON.
    overrun: items with one prompt stay in one job up to so many times `items` and `characters`."""

    items: int
    sequences: int
    characters: int
    overrun: int = 1


class Measure(NamedTuple):
    """Of an item. key: a job has items of one key. prompt: the beginning that items may share."""

    key: Hashable
    prompt: str
    sequences: int
    characters: int


def packed(
    items: Iterable[T], limits: PackLimits, measure: Callable[[T], Measure]
) -> Iterator[list[T]]:
    """The items in their order, in lists that one job each takes. An item that exceeds the limits
    is alone in its job."""
    pack: list[T] = []
    last: Measure | None = None
    sequences = characters = 0
    for item in items:
        found = measure(item)
        if last is not None:
            times = limits.overrun if found.prompt == last.prompt else 1
            fits = (
                found.key == last.key
                and len(pack) < times * limits.items
                and sequences + found.sequences <= limits.sequences
                and characters + found.characters <= times * limits.characters
            )
            if not fits:
                yield pack
                pack, sequences, characters = [], 0, 0
        pack.append(item)
        sequences += found.sequences
        characters += found.characters
        last = found
    if pack:
        yield pack
