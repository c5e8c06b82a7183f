"""RMS norm (Zhang & Sennrich 2019), computed in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.weight import Parameter, WeightSlot


class RMSNorm:
    """x * rsqrt(mean(x²) + eps) * w over the last dimension of `size`."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.eps = size, eps
        self._weight = Parameter(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), self._weight.value, self.eps)

    def weight_slot(self) -> WeightSlot:
        return self._weight.slot()
