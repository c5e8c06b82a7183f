"""Small steps by the kernel calls of an earlier step of the same form.

Most of the time of a small step outside of the kernels is Python. The calls of a step depend on how
many tokens each sequence advances by, and on where the caches are; what differs otherwise are the
values of a few tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.attention import Stored, relocate
from worker.kernels.recording import Arena, record
from worker.layers.batch import Batch, DecodeGroup, ShortGroup
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.rope import Rope, Rotation

MOST_ROWS = 32  # of a step that is recorded: its tensors stay in memory
MOST_STEPS = 64  # that are kept
MOST_FORMS = 1024  # that are counted

Rotations = Mapping[Rope, Rotation]
# Hidden states [tokens, hidden] through all layers → logits [rows, vocab].
Compute = Callable[[Tensor, Rotations, Batch, Sequence[LayerCache]], Tensor]
Group = TypeVar("Group", DecodeGroup, ShortGroup)
# Number of threads, number of single tokens, then the lengths of the chunks.
Form = tuple[int, ...]


class Step:
    """A recorded step. `__call__` computes another one of its form, in the same memory. `stored`:
    the caches, which may be at another place."""

    def __init__(
        self,
        compute: Compute,
        x: Tensor,
        rotations: Rotations,
        batch: Batch,
        caches: Sequence[LayerCache],
        stored: Sequence[Stored],
        arena: Arena,
    ) -> None:
        self._x = x.clone()
        self._rotations = {
            rope: Rotation(one.cos.clone(), one.sin.clone()) for rope, one in rotations.items()
        }
        self._decode, self._short = _own(batch.decode), _own(batch.short)
        batch = replace(batch, decode=self._decode, short=self._short)
        with record(arena) as recording:
            self.logits = compute(self._x, self._rotations, batch, caches)
        self.usable = recording.refused is None and len(recording.attention) == len(stored)
        self._program, self._attention = recording.program, recording.attention
        self._place = _place_of(stored)

    def __call__(
        self, x: Tensor, rotations: Rotations, batch: Batch, stored: Sequence[Stored]
    ) -> Tensor:
        place = _place_of(stored)
        if place != self._place:
            for first, cache in zip(self._attention, stored, strict=True):
                relocate(self._program.words, first, cache)
            self._place = place
        self._x.copy_(x)
        for mine, its in ((self._decode, batch.decode), (self._short, batch.short)):
            if mine is not None and its is not None:
                mine.slots.copy_(its.slots)
                mine.positions.copy_(its.positions)
        for rope, kept in self._rotations.items():
            kept.cos.copy_(rotations[rope].cos)
            kept.sin.copy_(rotations[rope].sin)
        self._program()
        return self.logits


def _own(group: Group | None) -> Group | None:
    """The group with slots and positions of its own."""
    if group is None:
        return None
    return replace(group, slots=group.slots.clone(), positions=group.positions.clone())


def _place_of(stored: Sequence[Stored]) -> list[tuple[int, int, int]]:
    return [(one.keys.data_ptr(), one.values.data_ptr(), one.keys.shape[2]) for one in stored]


class Replay:
    """Computes the layers of a model. Small steps are recorded when their form comes for the second
    time, and made again from then on, if nothing but kernels computes them."""

    def __init__(self) -> None:
        self._steps: dict[Form, Step] = {}  # the last used one is the last
        self._seen: set[Form] = set()
        self._arena = Arena()
        self.enabled = True

    def __call__(
        self,
        compute: Compute,
        x: Tensor,
        rotations: Rotations,
        batch: Batch,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """What `compute` returns. The next call overwrites it."""
        stored = _stored(x, batch, caches) if self.enabled else None
        if stored is None:
            return compute(x, rotations, batch, caches)
        chunks = (one.length for one in batch.chunks)
        form = (torch.get_num_threads(), batch.decode.size if batch.decode else 0, *chunks)
        step = self._steps.pop(form, None)
        if step is None:
            if form not in self._seen:
                if len(self._seen) == MOST_FORMS:
                    self._seen.clear()
                self._seen.add(form)
                return compute(x, rotations, batch, caches)
            step = Step(compute, x, rotations, batch, caches, stored, self._arena)
            logits = step.logits
            self.enabled = step.usable or bool(batch.chunks)
        elif step.usable:
            logits = step(x, rotations, batch, stored)
        else:
            logits = compute(x, rotations, batch, caches)
        self._steps[form] = step
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return logits


def _stored(x: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> list[Stored] | None:
    """The caches, of a step that may be recorded: its chunks are computed by kernels as well."""
    decode, short = batch.decode, batch.short
    if (
        len(x) > MOST_ROWS
        or batch.logits_rows is not None
        or len(batch.chunks) != (short.chunks if short else 0)
        or not library.serves(x)
    ):
        return None
    found = []
    for cache in caches:
        if not isinstance(cache, FullKVCache | WindowKVCache):
            return None
        stored = cache.stored()
        for group in (decode, short):
            if group is not None:
                stored.require(slots=group.high, positions=group.longest)
        found.append(stored)
    return found
