"""Settings of the process that generates: memory, threads, and how the interpreter is shared.

All of them were measured on a two-core machine; docs/performance.md has the figures.
"""

from __future__ import annotations

import ctypes
import sys

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEEP_BYTES = 256 * 2**20  # free memory that the process keeps for the next operation
MMAP_BYTES = 32 * 2**20  # larger blocks come from the system, and go back when freed
SWITCH_SECONDS = 0.0005  # how long a thread may hold the interpreter while the other one waits
SMALL_BYTES = 64 * 2**20  # weights of a model whose steps are too short to be shared
THREADS = torch.get_num_threads()  # what torch, or OMP_NUM_THREADS, gives a larger one


def tune() -> None:
    """Call once, before the engine's thread starts.

    glibc gives a thread that isn't the main one an arena of its own, which hands memory back to the
    system after every operation and takes it again for the next: small models ran at half speed.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)
        libc.mallopt(M_TRIM_THRESHOLD, KEEP_BYTES)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


def give_back_memory() -> None:
    """Hand all free memory to the system. For moments when nothing runs."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def share_cores(weight_bytes: int) -> None:
    """Set the threads of CPU arithmetic by the size of the model. Threads of a short step wait for
    each other longer than they work as soon as anything else wants a core."""
    torch.set_num_threads(1 if weight_bytes < SMALL_BYTES else THREADS)
