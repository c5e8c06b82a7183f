"""The tensors of a state file: one name per view of each layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.layers.cache import LayerCache, Size, by_slot, paged


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One view of one layer's cache. Those of blocks have tokens as dimension 1."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class StateLayout:
    """`make_caches`: those of a model. The first tokens of a text have one tensor per view of each
    layer whose state can be cut, and another one per view and snapshot of each other layer."""

    def __init__(self, make_caches: Callable[[], list[LayerCache]]) -> None:
        self._make_caches = make_caches
        self.kinds = tuple(layer.kind for layer in make_caches())

    def blocks(self, end: int) -> list[StateTensor]:
        """The tensors of the first `end` tokens, in the order of `copy_blocks`."""
        found = []
        for number, layer in enumerate(self._make_caches()):
            for one in paged([layer]):
                for part, storage in zip(one.parts, one.storage(), strict=True):
                    _, heads, _, *rest = storage.shape
                    name = f"layers.{number}.{part}"
                    found.append(StateTensor(name, storage.dtype, (heads, end, *rest)))
        return found

    def snapshot(self, end: int) -> list[StateTensor]:
        """The tensors of a snapshot after `end` tokens, in the order of `copy_snapshot`."""
        found = []
        for number, layer in enumerate(self._make_caches()):
            for one in by_slot([layer]):
                one.resize(Size(1, end, 0), keep=0)
                for part, view in zip(one.parts, one.views(0, end), strict=True):
                    name = f"layers.{number}.{part}.after.{end}"
                    found.append(StateTensor(name, view.dtype, tuple(view.shape)))
        return found
