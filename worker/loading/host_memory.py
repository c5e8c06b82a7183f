"""Models that stay in host memory when their device is given to others, so that a swap back reads
no file.

On the CPU a model that is unloaded stays as the kernels read it: packing its weights is most of a
load. On a GPU the load fills the host's copy on the way to the device, as the tensors were read and
in pinned memory; unloading copies nothing, and a swap back is a copy to the device.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from worker.checkpoint.headers import Checkpoint
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight
from worker.model_spec import ModelSpec

Loaded = TypeVar("Loaded")
Stamps = Mapping[Path, tuple[int, ...]]  # of files: they differ after any change


@dataclass(frozen=True, eq=False, slots=True)
class Kept(Generic[Loaded]):
    """A model in host memory. `restore`: loads it without its files. `stays`: also while it is on
    the device."""

    name: str
    restore: Callable[[], Loaded]
    nbytes: int
    files: Stamps
    stays: bool


class HostMemory(Generic[Loaded]):
    """Owns the models that are kept, at most `limit` bytes of them; the least recently used goes
    first. Used by the thread that loads models; any thread may read `kept`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._models: OrderedDict[ModelSpec, Kept[Loaded]] = OrderedDict()

    @property
    def kept(self) -> dict[str, int]:
        """The bytes of each model, by name."""
        return {one.name: one.nbytes for one in tuple(self._models.values())}

    def take(self, spec: ModelSpec) -> Kept[Loaded] | None:
        """A model that goes to the device; None if it is not here, or its files have changed. One
        that does not stay is not counted any more."""
        self.drop_changed(spec)
        found = self._models.pop(spec, None)
        if found is not None and found.stays:
            self._models[spec] = found
        return found

    def drop_changed(self, spec: ModelSpec) -> bool:
        """Drop a model whose files have changed. True if one was dropped."""
        found = self._models.get(spec)
        if found is None or stamps_of(found.files) == found.files:
            return False
        del self._models[spec]
        return True

    def make_room(self, nbytes: int, coming_back: ModelSpec | None = None) -> bool:
        """True if so many bytes can be kept; others are dropped for them. `coming_back`: a model
        that goes to the device next, and makes room by that."""
        left = self.limit - nbytes
        back = self._models.get(coming_back) if coming_back is not None else None
        if left < 0:
            return False
        if back is not None and not back.stays:
            left += back.nbytes
        for spec in list(self._models):
            if sum(one.nbytes for one in self._models.values()) <= left:
                break
            if spec != coming_back:
                del self._models[spec]
        return sum(one.nbytes for one in self._models.values()) <= left

    def keep(self, spec: ModelSpec, model: Kept[Loaded]) -> None:
        """Keep a model for which room was made."""
        self._models[spec] = model

    def clear(self) -> None:
        self._models.clear()


class CopiedCheckpoint:
    """Implements Checkpoint: reads tensors from another one and keeps a copy of each in host
    memory, from which it reads again. Pinned where a GPU copies from it."""

    def __init__(self, files: Checkpoint) -> None:
        self._files, self._copies = files, dict[str, Weight]()
        self.location, self.described_by = files.location, files.described_by
        self.tensors, self.readable = files.tensors, files.readable
        self.label, self.dtype = files.label, files.dtype
        self.fingerprint = files.fingerprint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The files are closed by whoever has opened them."""

    def read(self, name: str) -> Weight:
        copy = self._copies.get(name)
        if copy is None:
            copy = self._copies[name] = _copy(self._files.read(name))
        return copy


def stamps_of(files: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """What `stat` says of files; one that is gone has none."""
    found: dict[Path, tuple[int, ...]] = {}
    for file in files:
        with suppress(OSError):
            stat = os.stat(file)
            found[file] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def _copy(weight: Weight) -> Weight:
    if isinstance(weight, QuantisedTensor):
        return QuantisedTensor(weight.type, weight.shape, _own(weight.blocks))
    return _own(weight)


def _own(tensor: Tensor) -> Tensor:
    pinned = torch.cuda.is_available()
    own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
    return own.copy_(tensor)
