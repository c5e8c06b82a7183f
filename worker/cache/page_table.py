"""The pages of each slot, where attention reads them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker.kernels.attention import PAGE
from worker.layers.cache import pages_for
from worker.layers.transfer import to_device


class PageTable:
    """`tensor`, int32 [slots, n] on the device: the pages of each slot in the order of its tokens.
    What lies after them means nothing."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.tensor = torch.zeros(slots, 0, dtype=torch.int32, device=device)
        self._rows: list[list[int]] = [[] for _ in range(slots)]  # the same on the host

    def resize(self, pages: int) -> bool:
        """Have room for so many pages per slot. Returns True if `tensor` is another one now."""
        slots, before = self.tensor.shape
        if pages <= before:
            return False
        tensor = self.tensor.new_zeros(slots, pages)
        tensor[:, :before] = self.tensor
        self.tensor = tensor
        return True

    def place(self, rows: Iterable[tuple[int, int, int]]) -> None:
        """Set the page of each slot and number among its pages."""
        table = [*rows]
        for slot, number, page in table:
            self._rows[slot][number : number + 1] = [page]
        slots, numbers, pages = to_device(
            [value for column in zip(*table, strict=True) for value in column], self.tensor.device
        ).view(3, -1)
        self.tensor[slots, numbers] = pages.to(torch.int32)

    def pages(self, slot: int, start: int, end: int) -> list[int]:
        """The pages with the tokens [start, end) of a slot, where `start` begins a page."""
        return self._rows[slot][start // PAGE : pages_for(end)]
