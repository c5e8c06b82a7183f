"""A linear's weight whose merged tensors are multiplied in several ways: one product for each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.layers.linear_weight import LinearWeight


class JoinedWeights:
    """[out_features, in_features] as weights in layouts of their own, one below the other."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        self._weights = weights

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.cat([weight(x, None) for weight in self._weights], dim=1)
        return y if bias is None else y.add_(bias)
