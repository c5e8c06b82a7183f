"""Storage of a linear layer's weight: the interface, and the dense layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class LinearWeight(Protocol):
    """The weight of one linear in some layout, and the matrix product that reads that layout."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in_features] → x Wᵀ + bias [rows, out_features]."""


class DenseWeight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)


def merge(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensors [n, in_features] concatenated along their rows. A single tensor that has the
    right dtype and device is returned as it is, without a copy."""
    if len(parts) == 1:
        return parts[0].to(device=device, dtype=dtype)
    sizes = [len(part) for part in parts]
    merged = torch.empty(sum(sizes), parts[0].shape[1], dtype=dtype, device=device)
    for target, part in zip(merged.split(sizes), parts, strict=True):
        target.copy_(part)
    return merged
