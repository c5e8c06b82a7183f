"""The interface of a linear's weight, which each layout implements, and the layout of several
layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Products of rows with several weights, as `ExpertLinears`: x, counts → y.
GroupedProduct = Callable[[Tensor, Tensor], Tensor]


class LinearWeight(Protocol):
    """The weight of one linear in some layout, and the matrix product that reads that layout."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in_features] → x Wᵀ + bias [rows, out_features]."""


class JoinedWeight:
    """[out_features, in_features] as weights in layouts of their own, one below the other. Each has
    its own product."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        self._weights = weights

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = torch.cat([weight(x, None) for weight in self._weights], dim=1)
        return y if bias is None else y.add_(bias)
