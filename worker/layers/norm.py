"""RMS norms (Zhang & Sennrich 2019), computed in float32.

Two kinds: plain (weight w) and zero-centred (weight 1 + w, as in Gemma and Qwen3-Next). They also
differ in the order of cast and product, which matters in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.weight import Parameter, WeightSlot


class Norm(Protocol):
    """x [..., size] → the same shape and dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def weight_slot(self) -> WeightSlot: ...


MakeNorm = Callable[[int], Norm]  # takes the size of the last dimension


class RMSNorm:
    """x * rsqrt(mean(x²) + eps) * w over the last dimension of `size`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self._weight = Parameter(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self._weight.value, self.eps)

    def weight_slot(self) -> WeightSlot:
        return self._weight.slot()


class ZeroCentredRMSNorm:
    """x * rsqrt(mean(x²) + eps) * (1 + w). The product is in float32, before the cast."""

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self._weight = torch.empty(size, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self.size,), self._weight, self.eps).to(x.dtype)

    def weight_slot(self) -> WeightSlot:
        def load(tensor: Tensor) -> None:
            self._weight.copy_(tensor.float() + 1)

        return WeightSlot((self.size,), load)
