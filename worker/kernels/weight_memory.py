"""Memory for weights on the CPU: large mappings, backed by huge pages where Linux has them.

A step reads all weights once. With pages of 4 KiB it also reads a page table entry for each, and
in a virtual machine those of the host.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 26  # of a mapping for several tensors
OWN_BYTES = CHUNK_BYTES // 4  # more than this get a mapping of their own, so that chunks are filled
ALIGNMENT = 64  # bytes


class WeightMemory:
    """Hands out parts of mappings in order. A mapping is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk: weakref.ref[mmap.mmap] | None = None  # where the next tensor may fit
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, which nobody has filled. Raises MemoryError."""
        size = prod(shape) * dtype.itemsize
        if size == 0:
            return torch.empty(*shape, dtype=dtype)
        with self._lock:
            chunk, start = self._room(size)
        part = torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=start)
        return part.view(dtype).view(tuple(shape))

    def _room(self, size: int) -> tuple[mmap.mmap, int]:
        if size > OWN_BYTES:
            return _mapping(size), 0
        chunk = self._chunk() if self._chunk is not None else None
        if chunk is None or self._used + size > len(chunk):
            chunk, self._used = _mapping(CHUNK_BYTES), 0
            self._chunk = weakref.ref(chunk)
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return chunk, start


def _mapping(size: int) -> mmap.mmap:
    """`size` bytes, of which only those that are written take memory. Raises MemoryError."""
    try:
        chunk = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"no memory for {size} bytes of weights") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk


empty = WeightMemory().empty
