"""A linear's weight in bf16 as checkpoints have it, multiplied by the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kernels import dense, library
from worker.layers.linear_weight import linear

# Rows up to which the kernels of a level are faster than torch; always, where none are given.
MOST_ROWS = {"avx2": 32, "amx": 256}


def served(weight: Tensor) -> bool:
    """Whether the kernels multiply with this weight [out_features, in_features]."""
    return weight.is_cpu and weight.dtype is torch.bfloat16 and dense.serves(*weight.shape)


class Bf16Weight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self.tensor = weight
        self._most = MOST_ROWS.get(library.require().level.name)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        if self._most is not None and rows > self._most:
            return linear(x, self.tensor, bias)
        y = dense.linear(x, [(self.tensor, rows)])
        return y if bias is None else y.add_(bias)
