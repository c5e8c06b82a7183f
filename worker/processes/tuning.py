"""Process settings for generation: the allocator, the garbage collector and the interpreter's
switch interval.

The values were measured on a two-core machine; docs/optimisations.md has the figures.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8
TRIM_BYTES = 256 * 2**20  # free memory at the top of the heap that the allocator keeps
MMAP_BYTES = 32 * 2**20  # larger blocks are mapped one by one, and unmapped when freed
MMAPS = 65536  # blocks that are mapped one by one, at most: glibc's default
SWITCH_SECONDS = 0.0001  # how long a thread may hold the interpreter while another one waits


def tune() -> None:
    """Set the switch interval and the allocator. Call once, before the engine's thread starts.

    By default glibc gives every further thread an arena of its own, which returns memory to the
    system after each operation and requests it again for the next: small models ran at half speed.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    _set_allocator(M_ARENA_MAX, 1)
    keep_memory()


def keep_memory() -> None:
    """Let the allocator keep memory that was freed: activations of a prefill are allocated again
    in each layer. By default glibc returns them to the system, which then clears each page."""
    _set_allocator(M_TRIM_THRESHOLD, TRIM_BYTES)
    _set_allocator(M_MMAP_THRESHOLD, MMAP_BYTES)


@contextmanager
def returning_nothing() -> Iterator[None]:
    """A context in which the allocator returns no memory to the system: the resident set keeps the
    peak. After it, the allocator keeps memory as `keep_memory` says."""
    _set_allocator(M_TRIM_THRESHOLD, -1)
    _set_allocator(M_MMAP_MAX, 0)
    try:
        yield
    finally:
        _set_allocator(M_MMAP_MAX, MMAPS)
        keep_memory()


def freeze_gc_heap() -> None:
    """Let the garbage collector look only at what is allocated from now on. A full collection of
    the objects that imports and a model have left stops all threads for a tenth of a second and
    more. Objects without reference cycles are freed as before."""
    gc.collect()
    gc.freeze()


def unfreeze_gc_heap() -> None:
    """Let it look at everything again, so that a model that is closed can be freed."""
    gc.unfreeze()


def _set_allocator(parameter: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(parameter, value)
