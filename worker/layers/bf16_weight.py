"""A linear's weight in bf16 as checkpoints have it, multiplied by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import dense, library

# Rows up to which the kernels are faster than torch: with AVX-512 or AMX, and with AVX2.
MOST, MOST_BY_AVX2 = 256, 32


def served(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight [out_features, in_features]."""
    return weight.is_cpu and weight.dtype is torch.bfloat16 and dense.serves(*weight.shape)


class Bf16Weight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = weight
        self._most = MOST_BY_AVX2 if library.require().level.name == "avx2" else MOST

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > self._most:
            return F.linear(x, self.tensor, bias)
        y = dense.linear(x, [(self.tensor, len(x))])
        return y if bias is None else y.add_(bias)
