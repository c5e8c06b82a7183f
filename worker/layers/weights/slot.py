"""Slots for checkpoint tensors: a slot checks a tensor's shape and stores its values on the device.

A model declares `weight_map()`: checkpoint name → slot. The loader fills the slots one tensor at a
time and does not know how a layer stores its weights: a slot that cannot store quantised blocks
gets their values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight


@dataclass(frozen=True, slots=True)
class StackedPlace:
    """Place of a slot's tensor in a checkpoint tensor of shape [count, rows, ...] that stacks
    several of them: `tensor[index, rows]`. With `transposed`, the shape is [count, columns, rows].
    """

    name: str
    shape: tuple[int, ...]
    index: int
    rows: slice
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Place of one checkpoint tensor: the shape it must have, and the functions that store it."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    stacked: StackedPlace | None = None  # read instead where the checkpoint lacks the slot's name
    load_quantised: Callable[[QuantisedTensor], None] | None = None

    @property
    def quantised(self) -> bool:
        """True if quantised blocks are stored as they are."""
        return self.load_quantised is not None

    def fill(self, tensor: Weight) -> None:
        """Store a checkpoint tensor of either kind."""
        if not isinstance(tensor, QuantisedTensor):
            self.load(tensor)
        elif self.load_quantised is not None:
            self.load_quantised(tensor)
        else:
            self.load(tensor.dequantise(torch.float32))


class Parameter:
    """A plain tensor that one checkpoint tensor fills (norm weights), or a part of one."""

    def __init__(
        self,
        *shape: int,
        dtype: torch.dtype,
        device: torch.device,
        part: slice | None = None,
    ) -> None:
        self.value = torch.empty(0, dtype=dtype, device=device)
        self._shape, self._part = shape, part

    def slot(self) -> WeightSlot:
        return WeightSlot(self._shape, self._load)

    def _load(self, tensor: torch.Tensor) -> None:
        part = tensor if self._part is None else tensor[self._part]
        self.value = part.to(device=self.value.device, dtype=self.value.dtype)
