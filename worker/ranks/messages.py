"""The messages between the leader of a model's ranks and each follower, over a socket that only the
two have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from worker.cache.changes import CacheChange, Resize
from worker.layers.batch import Following, Span


@dataclass(frozen=True, slots=True)
class Part:
    """The model that is read, as the leader has checked it."""

    path: Path  # a folder, or a file of weights
    tied: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Start:
    """To a follower: read your part, to this device."""

    part: Part
    device: torch.device
    rank: int
    ranks: int
    threads: int


@dataclass(frozen=True, slots=True)
class Ready:
    """To the leader: the part is read."""


@dataclass(frozen=True, slots=True)
class Begin:
    """To a follower: connect, and make the caches, of so many slots. Steps follow."""

    slots: int


@dataclass(frozen=True, slots=True)
class Connected:
    """To the leader: the ranks can exchange, and the device of this one has so many bytes free."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """To a follower: change the caches, and say what came of it."""

    changes: tuple[CacheChange, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """To the leader. `lacking`: the storage that there is no memory for, as `fact` says; the
    changes after it were not made. `unsaved`: there was none for a state that should be kept."""

    lacking: Resize | None = None
    fact: str = ""
    unsaved: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """To a follower: one forward pass of spans that are in `row_order`."""

    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Follow:
    """To a follower: the step after the last one, whose tokens are exchanged first."""

    following: Following


@dataclass(frozen=True, slots=True)
class Failed:
    """To the leader: this follower ends, for this reason."""

    reason: str
