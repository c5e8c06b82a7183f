"""Returns memory to the system: pages of files that were read once, and free heap memory.

A tensor that stays mapped, such as an embedding table, is read from the file again page by page as
it is used. Works on Linux with glibc; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from pathlib import Path

MADV_DONTNEED = 4
RELEASE_BYTES = 128 * 2**20  # of tensors that were read
MAPS = Path("/proc/self/maps")


class ReadPages:
    """The resident pages of mapped files that are read one tensor after the other: they are dropped
    after each RELEASE_BYTES."""

    def __init__(self) -> None:
        self._touched = 0  # bytes read since pages were last dropped
        self._last = ""  # name of the last tensor read

    def reading(self, name: str, size: int, files: Iterable[Path]) -> None:
        """Count a tensor of `size` bytes that is read next, unless it was the last one."""
        if name == self._last:
            return
        self._last = name
        self._touched += size
        if self._touched > RELEASE_BYTES:
            release(files)
            self._touched = size


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
