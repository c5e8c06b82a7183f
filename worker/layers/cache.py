"""The interface of a layer's cache, and its storage.

Every kind of cache has the same interface, so that the engine admits, grows, clears and counts
memory without knowing which kind a layer has. Storage is a tensor with one row ("slot") per
sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.kernels import gpu


class LayerCache(Protocol):
    """The state that one layer keeps of all sequences."""

    needs_clearing: bool  # whether a new sequence would read what the slot's last one left
    by_position: bool  # whether what a token added stays as it is while later tokens are added
    rewinds: bool  # whether `restore` can keep some of the tokens, not only take all back
    kind: str  # caches of one kind and the same shapes can read the state of each other
    parts: tuple[str, ...]  # names of the views

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        """Set the capacity to `slots` sequences of up to `columns` tokens. The first `keep` slots
        keep their content, as many tokens as fit; added slots are zero."""

    def bytes_for(self, slots: int, columns: int) -> int:
        """Bytes of storage after `resize` with the same arguments."""

    def clear(self, slot: int) -> None:
        """Reset a slot to zero."""

    def views(self, slot: int, start: int, end: int) -> Sequence[Tensor]:
        """Views of the storage, to copy state from and to. If `by_position`: of what the tokens
        [start, end) of a slot added, with tokens as dimension 1. Otherwise `start` is 0 and the
        views are the state of a sequence of exactly `end` tokens."""

    def save(self, slot: int, start: int, end: int) -> Sequence[Tensor]:
        """Copies of what the tokens [start, end) are about to overwrite and earlier ones need."""

    def restore(self, slot: int, saved: Sequence[Tensor], start: int, kept: int, end: int) -> None:
        """Take back the tokens [kept, end) after `save` for [start, end); `kept` is `start` unless
        the cache rewinds."""


def resize_slots(storage: Tensor, slots: int, keep: int) -> Tensor:
    """`storage` [slots, ...] with another number of slots. The first `keep` are copied."""
    if slots == len(storage):
        return storage
    copy = zeros_like(storage, slots, *storage.shape[1:])
    copy[:keep] = storage[:keep]
    return copy


def resize_columns(storage: Tensor, slots: int, columns: int, keep: int) -> Tensor:
    """`storage` [slots, heads, columns, dim] with other numbers of slots and columns. The first
    `keep` slots are copied, and the others are zero, except on GPUs: kernels read only what tokens
    have written, and filling the storage of a large batch takes 20 ms."""
    old_slots, heads, old_columns, dim = storage.shape
    if (slots, columns) == (old_slots, old_columns):
        return storage
    shape = (slots, heads, columns, dim)
    copy = storage.new_empty(shape) if gpu.serves(storage) else zeros_like(storage, *shape)
    kept = min(columns, old_columns)
    copy[:keep, :, :kept] = storage[:keep, :, :kept]
    return copy


def zeros_like(storage: Tensor, *shape: int) -> Tensor:
    """Zeros of storage's dtype and device. On the CPU the operating system provides zeroed pages on
    first use, so capacity that no sequence has reached costs neither time nor memory."""
    if storage.device.type != "cpu":
        return storage.new_zeros(shape)
    pages = np.zeros(prod(shape) * storage.element_size(), dtype=np.uint8)
    return torch.from_numpy(pages).view(storage.dtype).view(shape)
