"""Copies of a slot's state: out of the layers' caches into blocks of a page each, and back
into another slot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels.attention import PAGE
from worker.layers.cache import LayerCache, by_slot, paged
from worker.layers.transfer import to_device


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


def copy_blocks(layers: Sequence[LayerCache], pages: Sequence[int], tokens: int) -> list[Copy]:
    """Copies of what so many tokens added, which are in these pages: one per page; the last may be
    shorter. All are in one tensor per shape and dtype."""
    groups: dict[tuple[torch.Size, torch.dtype], tuple[int, list[Tensor]]] = {}
    order = []
    for part in _storage(layers):
        number, members = groups.setdefault((part.shape, part.dtype), (len(groups), []))
        order.append((number, len(members)))
        members.append(part)
    together = [_copied(members, pages) for _, members in groups.values()]
    return [
        Copy(tuple(one[number, :, :, : tokens - number * PAGE] for one in together), tuple(order))
        for number in range(len(pages))
    ]


def _copied(parts: Sequence[Tensor], pages: Sequence[int]) -> Tensor:
    """[pages, parts, heads, PAGE, dim] of parts [all pages, heads, PAGE, dim]."""
    at = to_device(pages, parts[0].device)
    return torch.stack([part.index_select(0, at) for part in parts], dim=1)


def copy_snapshot(layers: Sequence[LayerCache], slot: int, end: int) -> Copy:
    """The state of all layers that have one per slot, which holds exactly `end` tokens."""
    return Copy.of(_at_end(layers, slot, end))


def write_pages(layers: Sequence[LayerCache], pages: Sequence[int], copies: Sequence[Copy]) -> None:
    """Write copies of what the tokens of a page added into these pages."""
    parts = zip(*(copy.views() for copy in copies), strict=True)
    for part, views in zip(_storage(layers), parts, strict=True):
        whole = [number for number, view in enumerate(views) if view.shape[1] == PAGE]
        if whole:
            to = to_device([pages[number] for number in whole], part.device)
            part[to] = torch.stack([views[number] for number in whole])
        for page, view in zip(pages, views, strict=True):
            if view.shape[1] < PAGE:
                part[page, :, : view.shape[1]] = view


def copy_page(layers: Sequence[LayerCache], start: int, end: int) -> None:
    """Copy a page to another one."""
    for part in _storage(layers):
        part[end] = part[start]


def write_snapshot(layers: Sequence[LayerCache], slot: int, snapshot: Copy, end: int) -> None:
    """Give a slot the state that `copy_snapshot` has copied after `end` tokens."""
    for view, copy in zip(_at_end(layers, slot, end), snapshot.views(), strict=True):
        view.copy_(copy)


def _storage(layers: Iterable[LayerCache]) -> list[Tensor]:
    return [part for layer in paged(layers) for part in layer.storage()]


def _at_end(layers: Iterable[LayerCache], slot: int, end: int) -> list[Tensor]:
    return [view for layer in by_slot(layers) for view in layer.views(slot, end)]
