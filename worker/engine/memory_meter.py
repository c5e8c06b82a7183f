"""The memory that a device has in use at most during each step of an engine.

There is a look in every step, so it takes microseconds (docs/optimisations.md).
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import torch

from worker.processes.resident import STATM


class MemoryMeter(Protocol):
    """Used by the thread that steps the engine."""

    def begin(self) -> None:
        """A step begins."""

    def peak(self) -> int:
        """Bytes in use at most since the last `begin`; 0 if the system does not say."""

    def close(self) -> None: ...


class CudaMeter:
    """What torch's allocator has given to tensors. `begin` resets the peak that
    `torch.cuda.max_memory_allocated` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        # `max_memory_allocated` sorts all of the allocator's figures first.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        return int(stats["allocated_bytes"]["all"]["peak"])

    def close(self) -> None:
        pass


class ProcessMeter:
    """The resident set of this process after the step. The allocator keeps most of what a step has
    freed (`keep_memory`), so that the peak of the step is still resident."""

    def __init__(self) -> None:
        self._statm: int | None = None
        try:
            self._statm = os.open(STATM, os.O_RDONLY)
            self._closed = weakref.finalize(self, os.close, self._statm)
        except OSError:
            pass  # there is no /proc
        self._page = os.sysconf("SC_PAGE_SIZE")

    def begin(self) -> None:
        pass

    def peak(self) -> int:
        if self._statm is None:
            return 0
        # Opening the file takes ten times as long as reading it.
        return int(os.pread(self._statm, 128, 0).split()[1]) * self._page

    def close(self) -> None:
        if self._statm is not None:
            self._statm = None
            self._closed()


def memory_meter(device: torch.device) -> MemoryMeter:
    return CudaMeter(device) if device.type == "cuda" else ProcessMeter()
