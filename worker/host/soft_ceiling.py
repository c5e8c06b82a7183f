"""A soft ceiling below the budget of a device: memory that nothing needs is freed before it is
lacking."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Protocol

import torch

from jobs.sizes import size_text
from worker.device import Device
from worker.processes.pages import trim_heap
from worker.processes.resident import resident_bytes

logger = logging.getLogger(__name__)

SHARE = 0.9  # of the budget


class Model(Protocol):
    """An engine, as the ceiling knows it."""

    @property
    def generations(self) -> int:
        """Sequences that have ended."""

    @property
    def peak_bytes(self) -> int:
        """Memory in use at most in one of its steps."""

    def evict(self, nbytes: int) -> int:
        """Drop up to so many bytes of kept state that no sequence uses. Returns how many."""


class SoftCeiling:
    """Used by the engine thread. It acts when the memory in use comes to lie above the ceiling, and
    again only after it was below: what is left then is needed, and the budget limits it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._limit = None if device.budget is None else int(device.budget * SHARE)
        self._above = False
        self._generations = 0  # at the last check
        self._process_bytes: int | None = None  # resident before the first load

    def before_load(self) -> None:
        """Call before each load: what is resident before the first one is not of the models."""
        if self._process_bytes is None:
            self._process_bytes = resident_bytes()

    def check(self, models: Collection[Model]) -> None:
        """Call after each step: looks at the memory if a sequence has ended."""
        if self._limit is None:
            return
        generations = sum(one.generations for one in models)
        if generations == self._generations:
            return
        self._generations = generations
        active = self.in_use()
        if active <= self._limit:
            self._above = False
        elif not self._above:
            self._above = True
            self._free(models, active, self._limit)

    def in_use(self) -> int:
        """Bytes that the models take of the device, with free memory that the allocator keeps."""
        if self._device.torch.type == "cuda":
            return torch.cuda.memory_reserved(self._device.torch)
        return max(0, resident_bytes() - (self._process_bytes or 0))

    def _free(self, models: Collection[Model], active: int, limit: int) -> None:
        self._empty()
        excess, evicted = self.in_use() - limit, 0
        for one in models:
            if evicted < excess:
                evicted += one.evict(excess - evicted)
        if evicted:
            self._empty()
        logger.warning(
            "the models have %s in use, more than %.0f%% of --memory %s (weights %s, peak of the "
            "process %s); free memory was returned, and %s of unused prefixes were dropped: give "
            "more memory, fewer models or smaller caches",
            size_text(active),
            100 * SHARE,
            size_text(self._device.budget or 0),
            size_text(sum(one.weights for one in self._device.held)),
            size_text(max((one.peak_bytes for one in models), default=0)),
            size_text(evicted),
        )

    def _empty(self) -> None:
        """Return memory that is free to the system."""
        if self._device.torch.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()
