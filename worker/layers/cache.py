"""The interfaces of a layer's cache, and its storage.

There are two kinds. A paged cache keeps what each token added as it is, in pages of PAGE tokens; a
table says which pages a sequence has, so that sequences take memory for the tokens that they have.
All others have a row of storage ("slot") per sequence. The engine admits, grows and counts memory
without knowing more of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from worker.kernels import gpu
from worker.kernels.attention import PAGE


class Size(NamedTuple):
    """Of the caches of a model: slots, the most tokens of a slot, and the pages of all slots."""

    slots: int
    columns: int
    pages: int


Moves = Sequence[tuple[int, int]]  # pages, and where they are from then on


class LayerCache(Protocol):
    """The state that one layer keeps of all sequences."""

    paged: bool
    needs_clearing: bool  # whether a new sequence would read what the slot's last one left
    rewinds: bool  # whether single tokens can be taken back, not only all of a step
    kind: str  # caches of one kind and the same shapes can read the state of each other
    parts: tuple[str, ...]  # names of the tensors of its state

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        """Set the capacity. The first `keep` slots keep their content, as many tokens as fit, or
        the first pages theirs, and those that `moves` names. What is added is zero on CPUs."""

    def bytes_for(self, size: Size) -> int:
        """Bytes of storage after `resize` with the same size."""


class PagedCache(LayerCache, Protocol):
    """A cache in which tokens change nothing of what earlier ones added."""

    token_bytes: int  # that a token takes

    def attach(self, table: Tensor) -> None:
        """Find the pages of slots in this table, see `Stored.pages`. Its values may change between
        steps."""

    def storage(self) -> Sequence[Tensor]:
        """The tensors, with pages as dimension 0 and the tokens of a page as dimension 2."""


class SlotCache(LayerCache, Protocol):
    """A cache that has one state per slot, which tokens overwrite."""

    def clear(self, slot: int) -> None:
        """Reset a slot to zero, if the cache needs it for a new sequence."""

    def views(self, slot: int, end: int) -> Sequence[Tensor]:
        """Views of the state of a sequence of exactly `end` tokens, to copy from and to."""

    def save(self, slot: int, start: int, end: int) -> Sequence[Tensor]:
        """Copies of what the tokens [start, end) are about to overwrite and earlier ones need."""

    def restore(self, slot: int, saved: Sequence[Tensor], start: int, kept: int, end: int) -> None:
        """Take back the tokens [kept, end) after `save` for [start, end); `kept` is `start` unless
        the cache rewinds."""


def paged(caches: Iterable[LayerCache]) -> list[PagedCache]:
    """The paged ones of the caches."""
    return [cache for cache in caches if _is_paged(cache)]


def by_slot(caches: Iterable[LayerCache]) -> list[SlotCache]:
    """The others."""
    return [cache for cache in caches if _is_by_slot(cache)]


def _is_paged(cache: LayerCache) -> TypeGuard[PagedCache]:
    return cache.paged


def _is_by_slot(cache: LayerCache) -> TypeGuard[SlotCache]:
    return not cache.paged


def pages_for(columns: int) -> int:
    """Pages of so many tokens."""
    return -(-columns // PAGE)


def sequence_size(tokens: int) -> Size:
    """The size for one sequence of so many tokens."""
    return Size(1, tokens, pages_for(tokens))


def resize_pages(storage: Tensor, pages: int, moves: Moves) -> Tensor:
    """`storage` [pages, ...] with another number of pages."""
    if pages == len(storage):
        assert not moves
        return storage
    copy = _empty_like(storage, pages, *storage.shape[1:])
    kept = min(pages, len(storage))
    copy[:kept] = storage[:kept]
    if moves:
        start, end = torch.tensor(moves, device=storage.device).unbind(1)
        copy[end] = storage[start]
    return copy


def resize_slots(storage: Tensor, slots: int, keep: int) -> Tensor:
    """`storage` [slots, ...] with another number of slots. The first `keep` are copied."""
    if slots == len(storage):
        return storage
    copy = zeros_like(storage, slots, *storage.shape[1:])
    copy[:keep] = storage[:keep]
    return copy


def resize_columns(storage: Tensor, slots: int, columns: int, keep: int) -> Tensor:
    """`storage` [slots, heads, columns, dim] with other numbers of slots and columns. The first
    `keep` slots are copied."""
    old_slots, heads, old_columns, dim = storage.shape
    if (slots, columns) == (old_slots, old_columns):
        return storage
    copy = _empty_like(storage, slots, heads, columns, dim)
    kept = min(columns, old_columns)
    copy[:keep, :, :kept] = storage[:keep, :, :kept]
    return copy


def _empty_like(storage: Tensor, *shape: int) -> Tensor:
    """Storage of keys or values, of which only what tokens have written is read. It is zero except
    on GPUs, where filling the storage of a large batch takes 20 ms."""
    return storage.new_empty(shape) if gpu.serves(storage) else zeros_like(storage, *shape)


def zeros_like(storage: Tensor, *shape: int) -> Tensor:
    """Zeros of storage's dtype and device. On the CPU the operating system provides zeroed pages on
    first use, so capacity that no sequence has reached costs neither time nor memory."""
    if storage.device.type != "cpu" or not prod(shape):
        return storage.new_zeros(shape)
    pages = np.zeros(prod(shape) * storage.element_size(), dtype=np.uint8)
    return torch.from_numpy(pages).view(storage.dtype).view(shape)
