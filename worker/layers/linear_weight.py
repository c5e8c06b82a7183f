"""Storage of a linear layer's weight: the interface, and the dense layout."""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


class LinearWeight(Protocol):
    """The weight of one linear in some layout, and the matrix product that reads that layout."""

    def load_part(self, part: int, tensor: Tensor) -> None:
        """Store one of the merged tensors [parts[part], in_features]. The weight is usable when all
        parts are loaded."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [rows, in_features] → x Wᵀ + bias [rows, out_features]."""


class DenseWeight:
    """One contiguous tensor [out_features, in_features]."""

    def __init__(
        self, in_features: int, parts: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._merger = PartMerger(in_features, parts, dtype, device)
        self._weight = torch.empty(0)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self._weight, bias)

    def load_part(self, part: int, tensor: Tensor) -> None:
        merged = self._merger.add(part, tensor)
        if merged is None:
            return
        # On the CPU the tensor is a view of the mapped file. Weights that every step reads are
        # copied into memory of their own.
        mapped = merged.device.type == "cpu" and merged.data_ptr() == tensor.data_ptr()
        self._weight = merged.clone() if mapped else merged


class PartMerger:
    """Concatenates checkpoint tensors [parts[i], in_features] to [sum(parts), in_features].

    The buffer is allocated when the first part arrives, so that an empty model takes no memory.
    """

    def __init__(
        self, in_features: int, parts: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._in_features, self._parts = in_features, parts
        self._dtype, self._device = dtype, device
        self._buffer: Tensor | None = None
        self._missing = set(range(len(parts)))

    def add(self, part: int, tensor: Tensor) -> Tensor | None:
        """Returns the merged tensor once all parts are there, else None. A single part that has
        the right dtype and device is returned as it is, without a copy."""
        if len(self._parts) == 1:
            return tensor.to(device=self._device, dtype=self._dtype)
        *starts, total = accumulate(self._parts, initial=0)
        if self._buffer is None:
            shape = (total, self._in_features)
            self._buffer = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._buffer[starts[part] : starts[part] + self._parts[part]].copy_(tensor)
        self._missing.discard(part)
        if self._missing:
            return None
        merged, self._buffer = self._buffer, None
        self._missing = set(range(len(self._parts)))
        return merged
