"""Caches of attention keys and values: of all positions in pages, or of the last ones in a ring.

Keys are stored after RoPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.attention import PAGE, Stored
from worker.layers.batch import Batch, Chunk
from worker.layers.cache import (
    LayerCache,
    Moves,
    Size,
    pages_for,
    resize_columns,
    resize_pages,
)

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
        the columns c <= p; the others may hold anything."""

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Store k, v [length, kv_heads, head_dim] of one chunk; returns the keys and values
        [kv_heads, n, head_dim] of the last n positions up to the chunk's end: all that it may
        see."""


class FullKVCache:
    """Keys and values of all positions [pages, kv_heads, PAGE, head_dim]."""

    paged = True
    needs_clearing = False
    rewinds = True
    kind = "full"
    parts: tuple[str, ...] = ("keys", "values")
    window: int | None = None

    def __init__(
        self, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.token_bytes = 2 * kv_heads * head_dim * dtype.itemsize
        self._keys = torch.zeros(0, kv_heads, PAGE, head_dim, dtype=dtype, device=device)
        # zeros_like of a meta tensor imports sympy, which takes a second.
        self._values = self._keys.new_zeros(self._keys.shape)
        self._table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._stored = Stored(self._keys, self._values, None, self._table)

    def attach(self, table: Tensor) -> None:
        self._table = table
        self._stored = Stored(self._keys, self._values, None, table)

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        self._keys = resize_pages(self._keys, size.pages, moves)
        self._values = resize_pages(self._values, size.pages, moves)
        self._stored = Stored(self._keys, self._values, None, self._table)

    def bytes_for(self, size: Size) -> int:
        return size.pages * PAGE * self.token_bytes

    def storage(self) -> tuple[Tensor, Tensor]:
        return self._keys, self._values

    def stored(self) -> Stored:
        return self._stored

    def append_decode(self, k: Tensor, v: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        group = batch.decode
        assert group is not None
        pages = self._table[group.slots, group.positions // PAGE]
        self._keys[pages, :, group.positions % PAGE] = k
        self._values[pages, :, group.positions % PAGE] = v
        rows = self._table[group.low : group.high, : pages_for(_rounded(group.longest))]
        keys, values = (x[rows].transpose(1, 2).flatten(2, 3) for x in (self._keys, self._values))
        return keys, values

    def append_chunk(self, k: Tensor, v: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        end = chunk.start + chunk.length
        positions = torch.arange(chunk.start, end, device=k.device)
        row = self._table[chunk.slot, : pages_for(end)]
        pages = row[positions // PAGE]
        self._keys[pages, :, positions % PAGE] = k
        self._values[pages, :, positions % PAGE] = v
        keys, values = (x[row].transpose(0, 1).flatten(1, 2) for x in (self._keys, self._values))
        return keys[:, :end], values[:, :end]


class WindowKVCache:
    """Keys and values of the last `window` positions, in a ring: column = position % window."""

    paged = False
    needs_clearing = False
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

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        columns = min(size.columns, self._size)
        self._keys = resize_columns(self._keys, size.slots, columns, keep)
        self._values = resize_columns(self._values, size.slots, columns, keep)
        self._stored = Stored(self._keys, self._values, self._size)

    def bytes_for(self, size: Size) -> int:
        columns = min(size.columns, self._size)
        return 2 * size.slots * columns * self._heads * self._dim * self._keys.element_size()

    def clear(self, slot: int) -> None:
        """Nothing: only columns that the sequence has written are read."""

    def views(self, slot: int, end: int) -> tuple[Tensor, Tensor]:
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
