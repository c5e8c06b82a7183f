"""What layers remember of a sequence. Every kind answers the same few questions, so that the engine
admits, grows, clears and counts without knowing which kind a layer has.

Storage is a tensor with one row ("slot") per sequence. Keys are kept after RoPE.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.layers.batch import Batch, Chunk

COLUMNS = 32  # decode reads multiples of so many


class LayerCache(Protocol):
    """The memory of one layer."""

    needs_clearing: bool  # whether a new sequence reads what an earlier one left in its slot

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        """Room for exactly `slots` sequences of up to `columns` tokens, never fewer columns than
        before; what the first `keep` slots hold stays."""

    def bytes_for(self, slots: int, columns: int) -> int:
        """Bytes of the storage that `resize` with these numbers makes."""

    def clear(self, slot: int) -> None:
        """Forget a sequence: the slot reads as new."""


class KVCache(LayerCache, Protocol):
    """Keys and values; full or windowed is the cache's own business."""

    window: int | None

    def append_decode(self, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Store k, v [size, kv_heads, head_dim] of the decode group; returns the keys and values
        [high - low, kv_heads, columns, head_dim] of its slot range. Column c is seen by a sequence
        at position p where c <= p."""

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Store k, v [length, kv_heads, head_dim] of one chunk; returns the keys and values
        [kv_heads, n, head_dim] of the last n positions up to the chunk's end that it may see."""


class FullKVCache:
    """Keys and values of all positions: [slots, kv_heads, columns, head_dim], column = position."""

    needs_clearing = False
    window: int | None = None

    def __init__(
        self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._heads, self._dim = kv_heads, head_dim
        self._keys = torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        self._keys = resized(self._keys, slots, columns, keep)
        self._values = resized(self._values, slots, columns, keep)

    def bytes_for(self, slots: int, columns: int) -> int:
        return 2 * slots * columns * self._heads * self._dim * self._keys.element_size()

    def clear(self, slot: int) -> None:
        # What lies behind a mask must be finite: 0 times NaN would spread it.
        self._keys[slot].zero_()
        self._values[slot].zero_()

    def append_decode(self, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        group = batch.decode
        assert group is not None
        self._keys[group.slots, :, group.positions] = k
        self._values[group.slots, :, group.positions] = v
        low, high, columns = group.low, group.high, _rounded(group.longest)
        return self._keys[low:high, :, :columns], self._values[low:high, :, :columns]

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        end = chunk.start + chunk.length
        keys, values = self._keys[chunk.slot], self._values[chunk.slot]
        keys[:, chunk.start : end] = k.transpose(0, 1)
        values[:, chunk.start : end] = v.transpose(0, 1)
        return keys[:, :end], values[:, :end]


class WindowKVCache:
    """The last `window` positions alone, in a ring: column = position modulo window."""

    needs_clearing = False

    def __init__(
        self, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window: int | None = window
        self._size, self._heads, self._dim = window, kv_heads, head_dim
        self._keys = torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._values = torch.zeros_like(self._keys)

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        self._keys = resized(self._keys, slots, min(columns, self._size), keep)
        self._values = resized(self._values, slots, min(columns, self._size), keep)

    def bytes_for(self, slots: int, columns: int) -> int:
        columns = min(columns, self._size)
        return 2 * slots * columns * self._heads * self._dim * self._keys.element_size()

    def clear(self, slot: int) -> None:
        self._keys[slot].zero_()
        self._values[slot].zero_()

    def append_decode(self, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        group = batch.decode
        assert group is not None
        at = group.positions % self._size
        self._keys[group.slots, :, at] = k
        self._values[group.slots, :, at] = v
        low, high, columns = group.low, group.high, _rounded(group.longest)
        return self._keys[low:high, :, :columns], self._values[low:high, :, :columns]

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        keys, values = self._keys[chunk.slot], self._values[chunk.slot]
        new_k, new_v = k.transpose(0, 1), v.transpose(0, 1)
        kept = min(chunk.start, self._size - 1)
        if kept:
            old = torch.arange(chunk.start - kept, chunk.start, device=k.device) % self._size
            seen_k = torch.cat([keys[:, old], new_k], dim=1)
            seen_v = torch.cat([values[:, old], new_v], dim=1)
        else:
            seen_k, seen_v = new_k, new_v
        stored = min(chunk.length, self._size)
        end = chunk.start + chunk.length
        columns = torch.arange(end - stored, end, device=k.device) % self._size
        keys[:, columns] = new_k[:, -stored:]
        values[:, columns] = new_v[:, -stored:]
        return seen_k, seen_v


class RecurrentCache:
    """The state of a gated delta net: the last inputs of its convolution and its memory.

    Its size doesn't depend on the sequence's length, and it can't be cut back to an earlier token.
    """

    needs_clearing = True

    def __init__(
        self,
        *,
        channels: int,
        kernel: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.inputs = torch.zeros(0, kernel - 1, channels, dtype=dtype, device=device)
        self.state = torch.zeros(0, heads, key_dim, value_dim, device=device)  # float32

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        self.inputs = _with_slots(self.inputs, slots, keep)
        self.state = _with_slots(self.state, slots, keep)

    def bytes_for(self, slots: int, columns: int) -> int:
        return slots * sum(
            one.element_size() * one.shape[1:].numel() for one in (self.inputs, self.state)
        )

    def clear(self, slot: int) -> None:
        self.inputs[slot].zero_()
        self.state[slot].zero_()


def _rounded(columns: int) -> int:
    """A few more columns than are seen, where there are so many: products of the same shape share
    the kernel that oneDNN builds for it, and keeps."""
    return -(-columns // COLUMNS) * COLUMNS


def _with_slots(storage: Tensor, slots: int, keep: int) -> Tensor:
    if slots == len(storage):
        return storage
    other = zeros_like(storage, slots, *storage.shape[1:])
    other[:keep] = storage[:keep]
    return other


def resized(storage: Tensor, slots: int, columns: int, keep: int) -> Tensor:
    """`storage` [slots, heads, columns, dim] of another size; beyond its first `keep` slots 0."""
    old_slots, heads, old_columns, dim = storage.shape
    if (slots, columns) == (old_slots, old_columns):
        return storage
    other = zeros_like(storage, slots, heads, columns, dim)
    other[:keep, :, :old_columns] = storage[:keep]
    return other


def zeros_like(storage: Tensor, *shape: int) -> Tensor:
    """Zeros of storage's kind. On the CPU the system provides them, page by page as they are used:
    room that no sequence has reached yet costs neither time nor memory."""
    if storage.device.type != "cpu":
        return storage.new_zeros(shape)
    room = np.zeros(prod(shape) * storage.element_size(), dtype=np.uint8)
    return torch.from_numpy(room).view(storage.dtype).view(shape)
