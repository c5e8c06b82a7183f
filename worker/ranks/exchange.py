"""The exchange of ranks on the CPU of one machine, over memory that they share.

The kernels in `src/exchange.cpp` write, wait and sum, so that steps of ranks are recorded as others
are. The memory has no name: it is gone with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.library import TYPE_CODES
from worker.layers.shard import Exchange

# The layout of the memory in src/exchange.cpp: a table with an entry for each rank (the number of
# its last piece, and whether it waits) and one for the group (whether it has ended), then two slots
# of each rank.
TABLE, SLOT = 1 << 14, 1 << 18  # bytes
ENTRY, POSTED, WAITS = 16, 0, 8  # words of 8 bytes


class ExchangeBroken(Exception):
    """Another rank is gone."""


class RankExchange(Exchange, Protocol):
    """An exchange of processes, whose methods raise ExchangeBroken. Calls that are recorded, or
    that a device makes later, can't: call `require` after them."""

    def connect(self, device: torch.device) -> None:
        """Called once by all ranks, before the first exchange, with the device of each."""

    def awaited(self) -> list[int]:
        """The ranks that this one waits for. Any thread may ask."""

    def end(self) -> None:
        """Let all ranks wait no longer. Any thread may call it."""

    def require(self) -> None:
        """Raises ExchangeBroken if the group has ended."""


@contextmanager
def new_memory(nbytes: int) -> Iterator[int]:
    """A descriptor of memory for one group, or of an empty file by which its ranks find each other,
    to give to other processes. Raises OSError."""
    memory = os.memfd_create("chatjobs-ranks")
    try:
        os.ftruncate(memory, nbytes)
        yield memory
    finally:
        os.close(memory)


class SharedExchange:
    """Implements `RankExchange`. `memory`: a descriptor of `new_memory` with `memory_bytes`, which
    it maps."""

    @staticmethod
    def memory_bytes(ranks: int) -> int:
        return TABLE + 2 * ranks * SLOT

    def __init__(self, memory: int, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._memory = mmap.mmap(memory, self.memory_bytes(ranks))
        self._table = np.frombuffer(self._memory, np.int64, TABLE // 8).reshape(-1, ENTRY)
        self._group = self._table.ctypes.data, rank, ranks

    def connect(self, device: torch.device) -> None:
        """The memory is all."""

    def sum(self, x: Tensor) -> Tensor:
        if x.dtype not in TYPE_CODES:
            return self.sum(x.float()).to(x.dtype)
        x = x.contiguous()
        library.require().exchange_sum(
            *self._group, x.data_ptr(), x.numel(), TYPE_CODES[x.dtype], torch.get_num_threads()
        )
        self.require()
        return x

    def first(self, x: Tensor) -> Tensor:
        x = x if x.stride(1) == 1 else x.contiguous()
        (rows, columns), size = x.shape, x.element_size()
        library.require().exchange_first(
            *self._group, x.data_ptr(), x.stride(0) * size, rows, columns * size
        )
        self.require()
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, size = x.shape
        out = None if self._rank else torch.empty(rows, self._ranks * size, dtype=x.dtype)
        library.require().exchange_gather(
            *self._group,
            x.data_ptr(),
            None if out is None else out.data_ptr(),
            rows,
            size * x.element_size(),
        )
        self.require()
        return x if out is None else out

    def awaited(self) -> list[int]:
        posted = self._table[: self._ranks, POSTED]
        if not self._table[self._rank, WAITS]:
            return []
        return [rank for rank, number in enumerate(posted) if number < posted[self._rank]]

    def end(self) -> None:
        self._table[self._ranks, 0] = 1

    def require(self) -> None:
        if self._table[self._ranks, 0]:
            raise ExchangeBroken("the group of ranks has ended")
