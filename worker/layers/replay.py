"""Decode steps by the kernel calls of an earlier step with as many rows.

Most of the time of a small step outside of the kernels is Python. The calls of a step depend on its
number of rows and on where the caches are; the tokens differ only in the values of a few tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.attention import Stored
from worker.kernels.recording import call_again, record
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.rope import Rope, Rotation

MOST_ROWS = 32  # of a step that is recorded: its tensors are kept

Rotations = Mapping[Rope, Rotation]
# Hidden states [tokens, hidden] through all layers → logits [rows, vocab].
Compute = Callable[[Tensor, Rotations, Batch, Sequence[LayerCache]], Tensor]


class Step:
    """A recorded step. `__call__` computes another one with as many rows, in the same memory."""

    def __init__(
        self,
        compute: Compute,
        x: Tensor,
        rotations: Rotations,
        batch: Batch,
        caches: Sequence[LayerCache],
        place: object,
    ) -> None:
        group = batch.decode
        assert group is not None
        self.place = place
        self._x = x.clone()
        self._rotations = {
            rope: Rotation(one.cos.clone(), one.sin.clone()) for rope, one in rotations.items()
        }
        self._group = replace(group, slots=group.slots.clone(), positions=group.positions.clone())
        batch = replace(batch, decode=self._group)
        with record() as recording:
            self.logits = compute(self._x, self._rotations, batch, caches)
        self.usable = recording.refused is None
        self._recording = recording  # keeps the memory of the calls

    def __call__(self, x: Tensor, rotations: Rotations, batch: Batch) -> Tensor:
        group = batch.decode
        assert group is not None
        self._x.copy_(x)
        self._group.slots.copy_(group.slots)
        self._group.positions.copy_(group.positions)
        for rope, kept in self._rotations.items():
            kept.cos.copy_(rotations[rope].cos)
            kept.sin.copy_(rotations[rope].sin)
        call_again(self._recording.calls)
        return self.logits


class Replay:
    """Computes the layers of a model. Steps in which every sequence advances by one token are
    recorded and made again, if nothing but kernels computes them."""

    def __init__(self) -> None:
        self._steps: dict[int, Step] = {}  # by their number of rows
        self._usable = True

    def __call__(
        self,
        compute: Compute,
        x: Tensor,
        rotations: Rotations,
        batch: Batch,
        caches: Sequence[LayerCache],
    ) -> Tensor:
        """What `compute` returns. The next call overwrites it."""
        rows, place = len(x), self._place(x, batch, caches)
        if place is None:
            return compute(x, rotations, batch, caches)
        step = self._steps.get(rows)
        if step is not None and step.place == place:
            return step(x, rotations, batch)
        self._steps = {rows: step for rows, step in self._steps.items() if step.place == place}
        step = Step(compute, x, rotations, batch, caches, place)
        self._usable = step.usable
        if step.usable:
            self._steps[rows] = step
        return step.logits

    def _place(
        self, x: Tensor, batch: Batch, caches: Sequence[LayerCache]
    ) -> tuple[object, ...] | None:
        """What the recorded calls have in common: where the caches are. None for a step that can't
        be recorded."""
        group = batch.decode
        if (
            not self._usable
            or group is None
            or batch.chunks
            or batch.logits_rows is not None
            or group.size > MOST_ROWS
            or not library.serves(x)
        ):
            return None
        facts: list[object] = [torch.get_num_threads()]
        for cache in caches:
            if not isinstance(cache, FullKVCache | WindowKVCache):
                return None
            stored: Stored = cache.stored()
            stored.require(slots=group.high, positions=group.longest)
            facts += [stored.keys.data_ptr(), stored.values.data_ptr(), stored.keys.shape]
        return tuple(facts)
