"""Replays small steps: repeats the kernel calls of an earlier step of the same shape.

Most of the time of a small step outside of the kernels is Python. The calls of a step depend on how
many tokens each sequence advances by, and on where the caches are; what differs otherwise are the
values of a few tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.attention import Stored, relocate
from worker.kernels.recording import Arena, record
from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.kv_cache import FullKVCache, WindowKVCache
from worker.layers.rope import Rope, Rotation

MOST_STEPS = 64  # that are kept
MOST_FORMS = 1024  # that are counted
# Recording a step takes about as long as seven replays, so only forms that come often are worth it:
# chunks of prompts have as many forms as prompts have lengths.
RECORDED_AT = 5  # computations of a form that end with a recording
ATTENDED = (FullKVCache, WindowKVCache)  # caches that kernels read

Out = TypeVar("Out")
# The kind of computation, the sizes of the tables that it reads, the number of threads, and the
# shape of the batch.
Form = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs that differ between steps of one form: small batches, and values computed of them
    in advance. `x`: the embedded tokens [tokens, hidden]; None: the step embeds them. `rotations`:
    of all ropes, or none if the step looks them up in their tables. `table_sizes`: positions in the
    table of each rope; 0: it has none."""

    batch: Batch
    x: Tensor | None = None
    rotations: Mapping[Rope, Rotation] = field(default_factory=dict)
    table_sizes: tuple[int, ...] = ()

    def clone(self) -> Inputs:
        """The same in memory of its own."""
        rotations = self.rotations
        return replace(
            self,
            batch=self.batch.clone(),
            x=None if self.x is None else self.x.clone(),
            rotations={
                rope: Rotation(one.cos.clone(), one.sin.clone()) for rope, one in rotations.items()
            },
        )

    def tensors(self) -> list[Tensor]:
        """All that kernels read."""
        assert self.batch.packed is not None
        found = [self.batch.packed]
        if self.x is not None:
            found.append(self.x)
        for rotation in self.rotations.values():
            found += rotation.cos, rotation.sin
        return found


class Step(Generic[Out]):
    """A recorded step. `__call__` computes another one of its form, in the same memory. `stored`:
    the caches, which may be at another place; each of `passes` reads all of them."""

    def __init__(
        self,
        compute: Callable[[Inputs], Out],
        inputs: Inputs,
        stored: Sequence[Stored],
        passes: int,
        arena: Arena,
    ) -> None:
        inputs = inputs.clone()
        with record(arena) as recording:
            self.out = compute(inputs)
        self._inputs, self._tensors = inputs, inputs.tensors()
        self._program, self._attention = recording.program, recording.attention
        self._passes, self._place = passes, _place_of(stored)
        reads = passes * len(stored)
        self.usable = recording.refused is None and len(recording.attention) == reads

    def __call__(self, inputs: Inputs, stored: Sequence[Stored]) -> Out:
        place = _place_of(stored)
        if place != self._place:
            for first, cache in zip(self._attention, [*stored] * self._passes, strict=True):
                relocate(self._program.words, first, cache)
            self._place = place
        for mine, its in zip(self._tensors, inputs.tensors(), strict=True):
            mine.copy_(its)
        self._program()
        return self.out


def _place_of(stored: Sequence[Stored]) -> list[tuple[int, ...]]:
    return [one.place for one in stored]


class Replay:
    """Computes the layers of a model. Small steps are recorded when their form comes for the
    fifth time, and made again from then on, if nothing but kernels computes them."""

    def __init__(self) -> None:
        self._steps: dict[Form, Step[Any]] = {}  # the last used one is the last
        self._computed: Counter[Form] = Counter()  # steps without a recording
        self._arena = Arena()
        # Of steps that nothing but kernels computes, as far as known.
        self.most_rows = sys.maxsize

    def __call__(
        self,
        compute: Callable[[Inputs], Out],
        inputs: Inputs,
        caches: Sequence[LayerCache],
        passes: int = 1,
        kind: Form = (),
    ) -> Out:
        """The result of `compute`, which takes one token more of each sequence in each pass but the
        first. The next call overwrites it. `kind`: equal for calls that differ in `inputs` only."""
        batch = inputs.batch
        rows = len(batch.token_ids)
        stored = _stored(batch, caches, passes) if rows <= self.most_rows else None
        if stored is None:
            return compute(inputs)
        form = (*kind, *inputs.table_sizes, torch.get_num_threads(), *batch.shape)
        step = self._steps.pop(form, None)
        if step is None:
            self._computed[form] += 1
            if self._computed[form] < RECORDED_AT:
                if len(self._computed) > MOST_FORMS:
                    self._computed.clear()
                return compute(inputs)
            del self._computed[form]
            step = Step(compute, inputs, stored, passes, self._arena)
            out: Out = step.out
            if not (step.usable or batch.chunks or kind):
                self.most_rows = rows - 1  # torch computes products of many rows, or all
        elif step.usable:
            out = step(inputs, stored)
        else:
            out = compute(inputs)
        self._steps[form] = step
        if len(self._steps) > MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        return out


def _stored(batch: Batch, caches: Sequence[LayerCache], passes: int) -> list[Stored] | None:
    """The caches, of a step that may be recorded: its chunks are computed by kernels as well."""
    if not batch.small:
        return None
    groups = [group for group in (batch.decode, batch.short) if group is not None]
    slots = max(group.high for group in groups)
    positions = max(group.longest for group in groups) + passes - 1
    found = []
    for cache in caches:
        if not isinstance(cache, ATTENDED):
            return None
        stored = cache.stored()
        if not library.serves(stored.keys):
            return None
        stored.require(slots=slots, positions=positions)
        found.append(stored)
    return found
