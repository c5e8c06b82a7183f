"""Returns memory to the system: pages of files that were read once, and free heap memory.

A tensor that stays mapped, such as an embedding table, is read from the file again page by page as
it is used. Works on Linux with glibc; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

MADV_DONTNEED = 4
MAPS = Path("/proc/self/maps")


def release(files: Iterable[Path]) -> None:
    """Drop the resident pages of mapped files, then trim the heap."""
    if not MAPS.exists():
        return
    names = {str(file.resolve()) for file in files}
    libc = ctypes.CDLL(None)
    for line in MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, _, rest = line.partition(" ")
        if rest.split(maxsplit=4)[-1].strip() in names:
            start, end = (int(address, 16) for address in addresses.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)
    trim_heap()


def trim_heap() -> None:
    """Return all free heap memory to the system."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
