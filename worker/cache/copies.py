"""Copies of a slot's state: out of the layers' caches into blocks, and back into another slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.cache.prefix_store import BLOCK
from worker.layers.cache import LayerCache


@dataclass(frozen=True, slots=True)
class Copy:
    """Copies of views in one tensor per shape and dtype: few allocations, whole bytes to count."""

    tensors: tuple[Tensor, ...]  # [views, …]
    order: tuple[tuple[int, int], ...]  # of each view: which tensor, which row

    @classmethod
    def of(cls, views: Iterable[Tensor]) -> Copy:
        groups: dict[tuple[torch.Size, torch.dtype], tuple[int, list[Tensor]]] = {}
        order = []
        for view in views:
            number, members = groups.setdefault((view.shape, view.dtype), (len(groups), []))
            order.append((number, len(members)))
            members.append(view)
        return cls(tuple(torch.stack(members) for _, members in groups.values()), tuple(order))

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    def views(self) -> list[Tensor]:
        """The copies, in the order of what was copied."""
        rows = [one.unbind(0) for one in self.tensors]
        return [rows[tensor][row] for tensor, row in self.order]


def copy_blocks(layers: Sequence[LayerCache], slot: int, start: int, end: int) -> list[Copy]:
    """Copies of the state that the tokens [start, end) of a slot added, one per BLOCK tokens; the
    last may be shorter."""
    views = _by_position(layers, slot, start, end)
    if not views:
        return [Copy.of(()) for _ in range(start, end, BLOCK)]
    return [
        Copy.of(parts) for parts in zip(*(view.split(BLOCK, dim=1) for view in views), strict=True)
    ]


def copy_snapshot(layers: Sequence[LayerCache], slot: int, end: int) -> Copy:
    """The state of all layers that can't be cut; the slot holds exactly `end` tokens."""
    return Copy.of(_at_end(layers, slot, end))


def write_copies(
    layers: Sequence[LayerCache],
    slot: int,
    blocks: Sequence[Copy],
    snapshot: Copy | None,
    end: int,
) -> None:
    """Give a slot the first `end` tokens, which the blocks hold."""
    parts = zip(*(block.views() for block in blocks), strict=True)
    for view, copies in zip(_by_position(layers, slot, 0, end), parts, strict=True):
        torch.cat(copies, dim=1, out=view)
    if snapshot is not None:
        for view, copy in zip(_at_end(layers, slot, end), snapshot.views(), strict=True):
            view.copy_(copy)


def _by_position(layers: Sequence[LayerCache], slot: int, start: int, end: int) -> list[Tensor]:
    return _views((one for one in layers if one.by_position), slot, start, end)


def _at_end(layers: Sequence[LayerCache], slot: int, end: int) -> list[Tensor]:
    return _views((one for one in layers if not one.by_position), slot, 0, end)


def _views(layers: Iterable[LayerCache], slot: int, start: int, end: int) -> list[Tensor]:
    return [view for layer in layers for view in layer.views(slot, start, end)]
