"""Settings of a process whose torch work happens on one thread beside the main one.

Without them glibc gives that thread an arena of its own, which hands memory back to the system
after every operation and takes it again for the next: small models ran at half their speed.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEEP_BYTES = 256 * 2**20  # free memory that the process keeps for the next operation
MMAP_BYTES = 32 * 2**20  # larger blocks come from the system, and go back when freed
SWITCH_SECONDS = 0.0005  # how long a thread may hold the interpreter while the other one waits


def tune() -> None:
    """Call once, before the engine's thread starts. Does nothing without glibc."""
    sys.setswitchinterval(SWITCH_SECONDS)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
