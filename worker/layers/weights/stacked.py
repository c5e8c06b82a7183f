"""The weights of one projection of all experts of a layer on accelerators: the interface of their
layouts, and those that torch multiplies with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight

# Values of all experts that are dequantised for one product.
PRODUCT_VALUES = 1 << 24
ALIGNED = 16  # outputs of a product are a multiple, if there are so many


class StackedWeight(Protocol):
    """[out_features, in_features] of each expert, merged along its rows from one or more tensors.
    A product waits for nothing: no shape in it depends on values of the device."""

    def put(self, expert: int, parts: Sequence[Weight]) -> None:
        """Store the tensors of an expert, which have the types of the first one's."""

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [rows, in_features], the rows of each expert together, in the order of the experts;
        counts [experts], the rows of each → [rows, out_features]."""


class PlainStack:
    """One plain tensor [experts, out_features, in_features]."""

    def __init__(
        self, experts: int, parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (experts, sum(map(len, parts)), parts[0].shape[1])
        self._weight = torch.empty(shape, dtype=dtype, device=device)

    def put(self, expert: int, parts: Sequence[Weight]) -> None:
        start = 0
        for part in parts:
            assert isinstance(part, Tensor)
            self._weight[expert, start : start + len(part)].copy_(part)
            start += len(part)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        return multiply(x, self._weight, counts)


class DequantisingStack:
    """Blocks [experts, rows, bytes per row] of each of the merged tensors. Each product dequantises
    them again, some rows of every expert at a time."""

    def __init__(
        self, experts: int, parts: Sequence[QuantisedTensor], device: torch.device
    ) -> None:
        self._stacks = []
        for part in parts:
            blocks = torch.empty(experts, *part.blocks.shape, dtype=torch.uint8, device=device)
            self._stacks.append(QuantisedTensor(part.type, (experts, *part.shape), blocks))

    def put(self, expert: int, parts: Sequence[Weight]) -> None:
        for stack, part in zip(self._stacks, parts, strict=True):
            assert isinstance(part, QuantisedTensor) and part.type is stack.type
            stack.blocks[expert].copy_(part.blocks)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        found = []
        for stack in self._stacks:
            experts, rows, columns = stack.shape
            step = rows_of_product(PRODUCT_VALUES, experts, columns)
            for first in range(0, rows, step):
                blocks = stack.blocks[:, first : first + step]
                some = QuantisedTensor(stack.type, (*blocks.shape[:2], columns), blocks)
                found.append(multiply(x, some.dequantise(x.dtype), counts))
        return torch.cat(found, dim=1)


def multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [rows, in_features] by weight [experts, out_features, in_features] → [rows, out_features],
    in one grouped product of torch."""
    ends = counts.cumsum(0).to(torch.int32)
    return F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends)


def rows_of_product(values: int, experts: int, columns: int) -> int:
    """Rows of every expert, of which all together have about so many values."""
    return max(1, values // (experts * columns) // ALIGNED) * ALIGNED
