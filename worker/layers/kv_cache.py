"""Caches of attention keys and values: all positions, or the last ones in a ring.

Keys are stored after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.attention import Stored
from worker.layers.batch import Batch, Chunk
from worker.layers.cache import LayerCache, resize_columns

COLUMNS = 32  # decode reads a multiple of this many columns


class KVCache(LayerCache, Protocol):
    """A cache of keys and values. Attention uses every kind in the same way."""

    window: int | None  # None: all positions are visible

    def stored(self) -> Stored:
        """The storage, for kernels that append and attend in one pass: the same object until it is
        at another place."""

    def append_decode(self, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Store k, v [size, kv_heads, head_dim] of the decode group; returns the keys and values
        [high - low, kv_heads, columns, head_dim] of its slot range. A sequence at position p sees
        the columns c <= p."""

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Store k, v [length, kv_heads, head_dim] of one chunk; returns the keys and values
        [kv_heads, n, head_dim] of the last n positions up to the chunk's end: all that it may
        see."""


class FullKVCache:
    """Keys and values of all positions: [slots, kv_heads, columns, head_dim], column = position."""

    needs_clearing = False
    by_position = True
    rewinds = True
    kind = "full"
    parts: tuple[str, ...] = ("keys", "values")
    window: int | None = None

    def __init__(
        self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._heads, self._dim = kv_heads, head_dim
        self._keys = torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        # zeros_like of a meta tensor imports sympy, which takes a second.
        self._values = self._keys.new_zeros(self._keys.shape)
        self._stored = Stored(self._keys, self._values, None)

    def share(self, table: Tensor) -> None:
        """Read the first columns of slots as `Stored.shared` says. Its values may change between
        steps, and say what is in this cache."""
        self._stored = Stored(self._keys, self._values, None, table)

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        self._keys = resize_columns(self._keys, slots, columns, keep)
        self._values = resize_columns(self._values, slots, columns, keep)
        self._stored = Stored(self._keys, self._values, None, self._stored.shared)

    def bytes_for(self, slots: int, columns: int) -> int:
        return 2 * slots * columns * self._heads * self._dim * self._keys.element_size()

    def clear(self, slot: int) -> None:
        # Masked columns are multiplied by 0, so they must be finite: 0 * NaN is NaN.
        self._keys[slot].zero_()
        self._values[slot].zero_()

    def views(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        return self._keys[slot, :, start:end], self._values[slot, :, start:end]

    def save(self, slot: int, start: int, end: int) -> tuple[Tensor, ...]:
        return ()

    def restore(self, slot: int, saved: Sequence[Tensor], start: int, kept: int, end: int) -> None:
        """Nothing: columns beyond a sequence's last token are hidden."""

    def stored(self) -> Stored:
        return self._stored

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
    """Keys and values of the last `window` positions, in a ring: column = position % window."""

    needs_clearing = False
    by_position = False
    rewinds = True
    parts: tuple[str, ...] = ("keys", "values")

    def __init__(
        self, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window: int | None = window
        self._size, self._heads, self._dim = window, kv_heads, head_dim
        self.kind = f"window {self._size}"
        self._keys = torch.zeros(0, kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._values = self._keys.new_zeros(self._keys.shape)
        self._stored = Stored(self._keys, self._values, window)

    def resize(self, slots: int, columns: int, *, keep: int) -> None:
        self._keys = resize_columns(self._keys, slots, min(columns, self._size), keep)
        self._values = resize_columns(self._values, slots, min(columns, self._size), keep)
        self._stored = Stored(self._keys, self._values, self._size)

    def bytes_for(self, slots: int, columns: int) -> int:
        columns = min(columns, self._size)
        return 2 * slots * columns * self._heads * self._dim * self._keys.element_size()

    def clear(self, slot: int) -> None:
        self._keys[slot].zero_()
        self._values[slot].zero_()

    def views(self, slot: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        columns = min(end, self._size)  # all of the ring that has been written
        return self._keys[slot, :, :columns], self._values[slot, :, :columns]

    def save(self, slot: int, start: int, end: int) -> tuple[Tensor, ...]:
        if end <= self._size:
            return ()  # columns that no token has yet
        assert end - start <= self._size
        columns = self._columns(start, end)
        return self._keys[slot][:, columns], self._values[slot][:, columns]

    def restore(self, slot: int, saved: Sequence[Tensor], start: int, kept: int, end: int) -> None:
        if saved and kept < end:
            columns = self._columns(kept, end)
            self._keys[slot][:, columns] = saved[0][:, kept - start :]
            self._values[slot][:, columns] = saved[1][:, kept - start :]

    def _columns(self, start: int, end: int) -> Tensor:
        return torch.arange(start, end, device=self._keys.device) % self._size

    def stored(self) -> Stored:
        return self._stored

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
            old = self._columns(chunk.start - kept, chunk.start)
            seen_k = torch.cat([keys[:, old], new_k], dim=1)
            seen_v = torch.cat([values[:, old], new_v], dim=1)
        else:
            seen_k, seen_v = new_k, new_v
        stored = min(chunk.length, self._size)
        end = chunk.start + chunk.length
        columns = self._columns(end - stored, end)
        keys[:, columns] = new_k[:, -stored:]
        values[:, columns] = new_v[:, -stored:]
        return seen_k, seen_v


def _rounded(columns: int) -> int:
    """Columns rounded up to a multiple of COLUMNS: oneDNN compiles and caches a kernel per shape of
    product."""
    return -(-columns // COLUMNS) * COLUMNS
