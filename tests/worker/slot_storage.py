"""Storage of caches outside of an engine, and what the slots of a pool hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.cache.changes import Place, Resize
from worker.cache.pool import CachePool
from worker.kernels.attention import PAGE
from worker.layers.cache import LayerCache, Size, by_slot, paged, pages_for


class SlotStorage:
    """Caches with so many slots of so many tokens. The pages of a slot lie apart."""

    def __init__(self, caches: Sequence[LayerCache], slots: int, columns: int) -> None:
        self.table = torch.zeros(0, 0, dtype=torch.int32)
        self._caches = caches
        self.resize(slots, columns)

    def resize(self, slots: int, columns: int) -> None:
        """Have more slots or columns."""
        kept, before = self.table.shape
        table = torch.full((slots, pages_for(columns)), -1, dtype=torch.int32)
        table[:kept, :before] = self.table
        missing, first = table < 0, kept * before
        order = torch.randperm(int(missing.sum()), generator=torch.Generator().manual_seed(1))
        table[missing] = (first + order).to(torch.int32)
        self.table = table
        for cache in self._caches:
            cache.resize(Size(slots, columns, table.numel()), keep=kept)
        for cache in paged(self._caches):
            cache.attach(table)

    def columns(self, cache: LayerCache, slot: int) -> list[Tensor]:
        """Copies of what a slot holds [kv_heads, columns, head_dim]."""
        if not cache.paged:
            return [view.clone() for one in by_slot([cache]) for view in one.views(slot, 1 << 30)]
        pages = self.table[slot].tolist()
        return [gathered(part, pages) for one in paged([cache]) for part in one.storage()]

    def fill(
        self, cache: LayerCache, slot: int, columns: int, value: float | Sequence[Tensor]
    ) -> None:
        """Overwrite the first columns of a slot of a paged cache: with a number, or with tensors
        [kv_heads, columns, head_dim]."""
        parts = [part for one in paged([cache]) for part in one.storage()]
        for number, part in enumerate(parts):
            for at in range(columns):
                new = value if isinstance(value, float) else value[number][:, at]
                part[int(self.table[slot, at // PAGE]), :, at % PAGE] = new


def gathered(storage: Tensor, pages: Sequence[int]) -> Tensor:
    """The tokens of pages, in order: [heads, tokens, dim]."""
    return storage[list(pages)].transpose(0, 1).flatten(1, 2)


def resize_pool(pool: CachePool, slots: int, columns: int) -> None:
    """Give all slots of a pool pages for so many tokens."""
    count = pages_for(columns)
    pool.execute(Resize(Size(slots, columns, slots * count), 0))
    rows = [
        (slot, number, number * slots + slot) for slot in range(slots) for number in range(count)
    ]
    pool.execute(Place(tuple(rows)))


def state_of(pool: CachePool, slot: int, end: int) -> list[Tensor]:
    """Copies of the state of a slot with so many tokens."""
    pages = pool.table.pages(slot, 0, end)
    found = [gathered(part, pages)[:, :end] for one in paged(pool.layers) for part in one.storage()]
    return found + [view.clone() for one in by_slot(pool.layers) for view in one.views(slot, end)]
