"""The memory of a model's KV cache on its device: storage of all slots, and kept states.

It decides nothing: it executes changes, which the numbers of the cache book call for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from worker.cache.changes import (
    Begin,
    CacheChange,
    Clear,
    Drop,
    Load,
    Protect,
    Release,
    Resize,
    Retain,
    Rewind,
    SaveBlocks,
    SaveSnapshot,
    Share,
)
from worker.cache.copies import Copy, copy_blocks, copy_snapshot, write_copies
from worker.cache.state_layout import StateLayout
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache


class CachePool:
    """Owns the layers' caches and the copies of kept states. Used by the thread that steps the
    engine.

    `shared`, int64 [slots, 2] on the CPU: of each slot another one, and how many of the first
    columns are equal in both. Attention reads them from one of the two.
    """

    def __init__(
        self,
        make_caches: Callable[[], list[LayerCache]],
        make_draft_caches: Callable[[], list[LayerCache]] = list,
        *,
        slots: int,
    ) -> None:
        self.shared = torch.zeros(slots, 2, dtype=torch.int64)
        self.kept: dict[int, Copy] = {}  # by the numbers of their states
        self._protected: dict[tuple[int, bool], _Protected] = {}  # by slot; True: of the draft
        self._make_caches, self._make_draft_caches = make_caches, make_draft_caches
        self._make_layers()

    @torch.inference_mode()  # storage that grew in a step consists of inference tensors
    def execute(self, change: CacheChange) -> None:
        """Make one change. Raises what torch raises if there is no memory."""
        match change:
            case Resize(slots, columns, keep):
                for layer in self._all:
                    layer.resize(slots, columns, keep=keep)
            case Release():
                self._protected.clear()
                self._make_layers()
            case Begin(slot):
                _clear(self.layers, slot)
            case Clear(slot):
                for layer in self._all:
                    layer.clear(slot)
            case Load():
                self.load(change)
            case SaveBlocks(slot, start, end, states):
                copies = copy_blocks(self.layers, slot, start, end)
                self.kept.update(zip(states, copies, strict=True))
            case SaveSnapshot(slot, end, state):
                self.kept[state] = copy_snapshot(self.layers, slot, end)
            case Protect(slot, start, end, draft):
                layers = self.draft_layers if draft else self.layers
                self._protected[slot, draft] = _Protected(layers, slot, start, end)
            case Rewind(slot, kept, draft):
                self._protected.pop((slot, draft)).rewind(kept)
            case Drop(state):
                self.kept.pop(state, None)
            case Retain(states):
                for number in self.kept.keys() - {*states}:
                    del self.kept[number]
            case Share(rows):
                self.shared.copy_(torch.tensor(rows)) if rows else self.shared.zero_()

    def load(self, load: Load) -> None:
        """Give a slot what kept states hold."""
        snapshot = None if load.snapshot is None else self.kept[load.snapshot]
        blocks = [self.kept[one] for one in load.blocks]
        write_copies(self.layers, load.slot, blocks, snapshot, load.end)

    def begin_draft(self, slot: int) -> None:
        """Prepare a slot of the draft, which computes a sequence on its own."""
        _clear(self.draft_layers, slot)

    def clear_draft(self, slot: int) -> None:
        """Reset a slot of the draft to zero: it may hold NaN."""
        self._protected.pop((slot, True), None)
        for layer in self.draft_layers:
            layer.clear(slot)

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
        for layer in self.layers:
            if isinstance(layer, FullKVCache):
                layer.share(self.shared)


class _Protected:
    """The tokens [start, end) of one slot, with a copy of the values that they overwrite. Made
    before they are computed."""

    def __init__(self, layers: Sequence[LayerCache], slot: int, start: int, end: int) -> None:
        self._slot, self._start, self._end = slot, start, end
        self._saved = [
            (layer, layer.save(slot, start, end)) for layer in layers if not layer.by_position
        ]

    def rewind(self, kept: int) -> None:
        """Take back the tokens [kept, end); see `Rewinding.kept`."""
        if kept < self._end:
            for layer, saved in self._saved:
                layer.restore(self._slot, saved, self._start, kept, self._end)


def _clear(layers: Sequence[LayerCache], slot: int) -> None:
    for layer in layers:
        if layer.needs_clearing:
            layer.clear(slot)
