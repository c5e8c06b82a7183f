"""Where checkpoint tensors go: named slots that check shapes and put values on the device.

A model declares `weight_map()`: checkpoint name → slot; the loader fills the slots one tensor at a
time and knows nothing of how a layer stores its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Place of one checkpoint tensor: the shape it must have, and what takes it."""

    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]


class Parameter:
    """A plain tensor that one checkpoint tensor fills (norm weights, embeddings)."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        self.value = torch.empty(0, dtype=dtype, device=device)
        self._shape = shape

    def slot(self) -> WeightSlot:
        return WeightSlot(self._shape, self._load)

    def _load(self, tensor: torch.Tensor) -> None:
        # A tensor that has the right dtype already stays what it is: on the CPU a view of the
        # mapped file, of which only the rows that are used become resident.
        self.value = tensor.to(device=self.value.device, dtype=self.value.dtype)
