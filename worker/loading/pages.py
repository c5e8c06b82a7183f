"""Gives memory back after loading: file pages that were read once, and the allocator's leftovers.

What stays mapped (an embedding table, of which each step reads a few rows) comes back page by page
when it is used. Linux with glibc; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

MADV_DONTNEED = 4
MAPS = Path("/proc/self/maps")


def release(files: Iterable[Path]) -> None:
    """Drop the resident pages of mapped files and return freed memory to the system."""
    if not MAPS.exists():
        return
    names = {str(file.resolve()) for file in files}
    libc = ctypes.CDLL(None)
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        place, _, rest = line.partition(" ")
        if rest.split(maxsplit=4)[-1].strip() in names:
            start, end = (int(part, 16) for part in place.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
