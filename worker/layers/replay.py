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
from worker.kernels.recording import Arena, call_again, record
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
Form = tuple[int, ...]  # number of single tokens, then the lengths of the chunks


class Step:
    """A recorded step. `__call__` computes another one of its form, in the same memory."""

    def __init__(
        self,
        compute: Compute,
        x: Tensor,
        rotations: Rotations,
        batch: Batch,
        caches: Sequence[LayerCache],
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
        self.usable = recording.refused is None
        self._calls = recording.calls

    def __call__(self, x: Tensor, rotations: Rotations, batch: Batch) -> Tensor:
        self._x.copy_(x)
        for mine, its in ((self._decode, batch.decode), (self._short, batch.short)):
            if mine is not None and its is not None:
                mine.slots.copy_(its.slots)
                mine.positions.copy_(its.positions)
        for rope, kept in self._rotations.items():
            kept.cos.copy_(rotations[rope].cos)
            kept.sin.copy_(rotations[rope].sin)
        call_again(self._calls)
        return self.logits


def _own(group: Group | None) -> Group | None:
    """The group with slots and positions of its own."""
    if group is None:
        return None
    return replace(group, slots=group.slots.clone(), positions=group.positions.clone())


class Replay:
    """Computes the layers of a model. Small steps are recorded when their form comes for the second
    time, and made again from then on, if nothing but kernels computes them."""

    def __init__(self) -> None:
        self._place: object = None  # of the recorded steps
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
        place = _place(x, batch, caches) if self.enabled else None
        if place is None:
            return compute(x, rotations, batch, caches)
        if place != self._place:
            self._place = place
            self._steps.clear()
        form = (batch.decode.size if batch.decode else 0, *(one.length for one in batch.chunks))
        step = self._steps.pop(form, None)
        if step is None:
            if form not in self._seen:
                if len(self._seen) == MOST_FORMS:
                    self._seen.clear()
                self._seen.add(form)
                return compute(x, rotations, batch, caches)
            step = Step(compute, x, rotations, batch, caches, self._arena)
            logits = step.logits
            self.enabled = step.usable or bool(batch.chunks)
        elif step.usable:
            logits = step(x, rotations, batch)
        else:
            logits = compute(x, rotations, batch, caches)
        self._steps[form] = step
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return logits


def _place(x: Tensor, batch: Batch, caches: Sequence[LayerCache]) -> tuple[object, ...] | None:
    """What recorded calls have in common: where the caches are, and whether the kernels compute the
    chunks. None for a step that can't be recorded."""
    decode, short = batch.decode, batch.short
    if (
        len(x) > MOST_ROWS
        or batch.logits_rows is not None
        or len(batch.chunks) != (short.chunks if short else 0)
        or not library.serves(x)
    ):
        return None
    facts: list[object] = [torch.get_num_threads()]
    for cache in caches:
        if not isinstance(cache, FullKVCache | WindowKVCache):
            return None
        stored = cache.stored()
        facts += [stored.keys.data_ptr(), stored.values.data_ptr(), stored.keys.shape]
        for group in (decode, short):
            if group is not None:
                stored.require(slots=group.high, positions=group.longest)
        ring = stored.window
        if short is not None and ring is not None and short.longest_chunk > ring:
            return None
    return tuple(facts)
