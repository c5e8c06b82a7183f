"""A linear's weight in bf16 as checkpoints have it, multiplied by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import dense, library

# Rows up to which the kernels are faster than torch: with the matrix unit, and by vectors alone.
MOST, MOST_BY_VECTORS = 256, 32


def served(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight [out_features, in_features]."""
    return weight.is_cpu and weight.dtype is torch.bfloat16 and dense.serves(*weight.shape)


class Bf16Weight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = weight
        self._most = MOST if library.require().level.name == "amx" else MOST_BY_VECTORS

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > self._most:
            return F.linear(x, self.tensor, bias)
        y = dense.linear(x, [(self.tensor, len(x))])
        return y if bias is None else y.add_(bias)
