"""The memory of a model's KV cache on its device: storage of all slots, and kept states.

It decides nothing: it executes changes, which the numbers of the cache book call for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from worker.cache.changes import (
    Begin,
    CacheChange,
    CopyPage,
    Drop,
    Fill,
    Load,
    Place,
    Protect,
    Release,
    Resize,
    Retain,
    Rewind,
    SaveBlocks,
    SaveSnapshot,
)
from worker.cache.copies import (
    Copy,
    copy_blocks,
    copy_page,
    copy_snapshot,
    write_pages,
    write_snapshot,
)
from worker.cache.page_table import PageTable
from worker.cache.state_layout import StateLayout
from worker.layers.cache import LayerCache, by_slot, paged, pages_for

CPU = torch.device("cpu")


class CachePool:
    """Owns the layers' caches, their page table and the copies of kept states. Used by the thread
    that steps the engine. The pages of a model and those of its draft have the same numbers.
    """

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        make_draft_caches: Callable[[], list[LayerCache]] = list,
        *,
        slots: int,
        device: torch.device = CPU,
    ) -> None:
        self.table = PageTable(slots, device)
        self.kept: dict[int, Copy] = {}  # by their numbers
        self._protected: dict[tuple[int, bool], _Protected] = {}  # by slot; True: of the draft
        self._make_caches, self._make_draft_caches = make_caches, make_draft_caches
        self._make_layers()

    @torch.inference_mode()  # storage that grew in a step consists of inference tensors
    def execute(self, change: CacheChange) -> None:
        """Make one change. Raises what torch raises if there is no memory."""
        match change:
            case Resize(size, keep, moves):
                for layer in self._all:
                    layer.resize(size, keep=keep, moves=moves)
                if self.table.resize(pages_for(size.columns)):
                    self._attach()
            case Place(rows):
                self.table.place(rows)
            case Release():
                self._protected.clear()
                self._make_layers()
            case Begin(slot):
                _clear(self.layers, slot)
            case Fill(rows):
                copies = [self.kept[number] for _, number in rows]
                write_pages(self.layers, [page for page, _ in rows], copies)
            case CopyPage(start, end):
                copy_page(self.layers, start, end)
            case Load(slot, snapshot, end):
                write_snapshot(self.layers, slot, self.kept[snapshot], end)
            case SaveBlocks(slot, start, end, numbers):
                pages = self.table.pages(slot, start, end)
                found = copy_blocks(self.layers, pages, end - start)
                self.kept.update(zip(numbers, found, strict=True))
            case SaveSnapshot(slot, end, number):
                self.kept[number] = copy_snapshot(self.layers, slot, end)
            case Protect(slot, start, end, draft):
                layers = self.draft_layers if draft else self.layers
                self._protected[slot, draft] = _Protected(layers, slot, start, end)
            case Rewind(slot, kept, draft):
                self._protected.pop((slot, draft)).rewind(kept)
            case Drop(number):
                self.kept.pop(number, None)
            case Retain(retained):
                for number in self.kept.keys() - {*retained}:
                    del self.kept[number]

    @torch.inference_mode()
    def copies_of_pages(self, pages: Sequence[int], tokens: int) -> list[Copy]:
        """A copy of each page of so many tokens."""
        return copy_blocks(self.layers, pages, tokens)

    def begin_draft(self, slot: int) -> None:
        """Prepare a slot of the draft, which computes a sequence on its own."""
        _clear(self.draft_layers, slot)

    def forget_draft(self, slot: int) -> None:
        """A slot of the draft holds nothing that is used any more."""
        self._protected.pop((slot, True), None)

    def layout(self) -> StateLayout:
        """The tensors of the state of a slot."""
        return StateLayout(self._make_caches)

    def close(self) -> None:
        """Free everything, also the model that `make_caches` belongs to."""
        self._make_caches = self._make_draft_caches = list
        self.kept.clear()
        self._protected.clear()
        self._make_layers()

    @property
    def _all(self) -> Iterable[LayerCache]:
        return [*self.layers, *self.draft_layers]

    def _make_layers(self) -> None:
        self.layers: Sequence[LayerCache] = self._make_caches()
        self.draft_layers: Sequence[LayerCache] = self._make_draft_caches()
        self._attach()

    def _attach(self) -> None:
        for layer in paged(self._all):
            layer.attach(self.table.tensor)


class _Protected:
    """The tokens [start, end) of one slot, with a copy of the values that they overwrite. Made
    before they are computed."""

    def __init__(self, layers: Sequence[LayerCache], slot: int, start: int, end: int) -> None:
        self._slot, self._start, self._end = slot, start, end
        self._saved = [(layer, layer.save(slot, start, end)) for layer in by_slot(layers)]

    def rewind(self, kept: int) -> None:
        """Take back the tokens [kept, end); see `Rewinding.kept`."""
        if kept < self._end:
            for layer, saved in self._saved:
                layer.restore(self._slot, saved, self._start, kept, self._end)


def _clear(layers: Sequence[LayerCache], slot: int) -> None:
    for layer in by_slot(layers):
        layer.clear(slot)
