"""Changes of the caches on a device, as values made of numbers.

They are executed in their order. Slots are numbered from 0. Each kept state, of a block or a
snapshot, has a number that no other one ever has.
"""

from __future__ import annotations

from typing import NamedTuple


class Resize(NamedTuple):
    """Storage for so many slots of so many tokens. The first `keep` slots keep their content."""

    slots: int
    columns: int
    keep: int


class Release(NamedTuple):
    """Free the storage of all slots."""


class Begin(NamedTuple):
    """Clear what a new sequence in a slot would read from the last one."""

    slot: int


class Clear(NamedTuple):
    """Reset a slot to zero: it may hold NaN."""

    slot: int


class Load(NamedTuple):
    """Give a slot the first `end` tokens, which kept states hold."""

    slot: int
    blocks: tuple[int, ...]
    snapshot: int | None
    end: int


class SaveBlocks(NamedTuple):
    """Keep what the tokens [start, end) of a slot added: one state for each block of them."""

    slot: int
    start: int
    end: int
    states: tuple[int, ...]


class SaveSnapshot(NamedTuple):
    """Keep the state of the layers that can't be cut; the slot holds exactly `end` tokens."""

    slot: int
    end: int
    state: int


class Protect(NamedTuple):
    """Save what the tokens [start, end), which may be taken back, will overwrite in a slot: of the
    model, or of its draft."""

    slot: int
    start: int
    end: int
    draft: bool = False


class Rewind(NamedTuple):
    """Take back the protected tokens from position `kept` on. Each `Protect` has one."""

    slot: int
    kept: int
    draft: bool = False


class Drop(NamedTuple):
    """Free a kept state."""

    state: int


class Retain(NamedTuple):
    """Free all kept states but these."""

    states: tuple[int, ...]


class Share(NamedTuple):
    """For each slot another one, and how many of the first columns are equal in both; empty: no
    slot shares columns."""

    rows: tuple[tuple[int, int], ...]


CacheChange = (
    Resize
    | Release
    | Begin
    | Clear
    | Load
    | SaveBlocks
    | SaveSnapshot
    | Protect
    | Rewind
    | Drop
    | Retain
    | Share
)  # fmt: skip
