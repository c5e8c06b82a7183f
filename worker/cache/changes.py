"""Changes of the caches on a device, as values made of numbers.

They are executed in their order. Slots and pages are numbered from 0. Each copy that is kept, of
what tokens added or a snapshot, has a number that no other one ever has.
"""

from __future__ import annotations

from typing import NamedTuple

from worker.layers.cache import Size


class Resize(NamedTuple):
    """Storage of this size. The first `keep` slots keep their content, and so do the first pages;
    `moves`: pages that are copied to others then. `shrinks`: it has fewer bytes than before."""

    size: Size
    keep: int
    moves: tuple[tuple[int, int], ...] = ()
    shrinks: bool = False


class Place(NamedTuple):
    """The tokens of slots are in pages: `rows` of a slot, a number among its pages, and a page."""

    rows: tuple[tuple[int, int, int], ...]


class Release(NamedTuple):
    """Free the storage of all slots."""


class Begin(NamedTuple):
    """Clear what a new sequence in a slot would read from the last one."""

    slot: int


class Fill(NamedTuple):
    """Write kept copies into pages: `rows` of a page and a copy."""

    rows: tuple[tuple[int, int], ...]


class CopyPage(NamedTuple):
    """Copy a page to another one."""

    start: int
    end: int


class Load(NamedTuple):
    """Give a slot a kept snapshot after `end` tokens."""

    slot: int
    snapshot: int
    end: int


class SaveBlocks(NamedTuple):
    """Copy what the tokens [start, end) of a slot added: one copy for each page of them."""

    slot: int
    start: int
    end: int
    copies: tuple[int, ...]


class SaveSnapshot(NamedTuple):
    """Copy the state of the layers that have one per slot, which holds exactly `end` tokens."""

    slot: int
    end: int
    copy: int


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
    """Free a kept copy."""

    copy: int


class Retain(NamedTuple):
    """Free all kept copies but these."""

    copies: tuple[int, ...]


CacheChange = (
    Resize
    | Place
    | Release
    | Begin
    | Fill
    | CopyPage
    | Load
    | SaveBlocks
    | SaveSnapshot
    | Protect
    | Rewind
    | Drop
    | Retain
)  # fmt: skip
