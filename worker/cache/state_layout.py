"""The tensors of a state file: one name per view of each layer's cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.cache.prefix_store import BLOCK
from worker.layers.cache import LayerCache


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
        return [
            StateTensor(name, dtype, (shape[0], end, *shape[2:]))
            for name, dtype, shape in self._views(BLOCK, by_position=True)
        ]

    def snapshot(self, end: int) -> list[StateTensor]:
        """The tensors of a snapshot after `end` tokens, in the order of `copy_snapshot`."""
        return [
            StateTensor(f"{name}.after.{end}", dtype, shape)
            for name, dtype, shape in self._views(end, by_position=False)
        ]

    def _views(
        self, end: int, *, by_position: bool
    ) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        found = []
        for number, layer in enumerate(self._make_caches()):
            if layer.by_position != by_position:
                continue
            layer.resize(1, end, keep=0)
            for part, view in zip(layer.parts, layer.views(0, 0, end), strict=True):
                found.append((f"layers.{number}.{part}", view.dtype, tuple(view.shape)))
        return found
