"""Linear layers: shape, split direction and checkpoint slots. The storage is a `LinearWeight`.

A model makes its linears through `LinearFactory`, whose methods name the direction in which tensor
parallelism may split the weight. All linears are computed whole at present.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from worker.layers import packing
from worker.layers.linear_weight import DenseWeight, LinearWeight
from worker.layers.weight import WeightSlot


class Split(Enum):
    """How a linear's weight [out_features, in_features] may be split across tensor-parallel ranks
    (Shoeybi et al. 2019, "Megatron-LM")."""

    COLUMN = "column"  # output features, each merged part on its own
    ROW = "row"  # input features; the ranks' outputs are summed
    REPLICATED = "replicated"  # not split: every rank holds the whole weight


class Linear:
    """y = x Wᵀ + b, with W [sum(parts), in_features] merged from one or more checkpoint tensors.

    `parts` are the output features of the merged tensors in order (q, k, v or gate, up).
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        split: Split,
        weight: LinearWeight,
        bias: Tensor | None,
    ) -> None:
        self.in_features, self.out_features = in_features, sum(parts)
        self.parts, self.split = parts, split
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] → [rows, out_features], in the layer's dtype."""
        return self._weight(x, self._bias)

    def weight_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one merged tensor [parts[part], in_features]."""

        def load(tensor: Tensor) -> None:
            self._weight.load_part(part, tensor)

        return WeightSlot((self.parts[part], self.in_features), load)

    def merged_slot(self) -> WeightSlot:
        """Slot of a checkpoint tensor [out_features, in_features] that holds all parts in order."""

        def load(tensor: Tensor) -> None:
            for part, rows in enumerate(tensor.split(self.parts)):
                self._weight.load_part(part, rows)

        return WeightSlot((self.out_features, self.in_features), load)

    def bias_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one merged bias [parts[part]]."""
        assert self._bias is not None
        start = sum(self.parts[:part])
        target = self._bias[start : start + self.parts[part]]

        def load(tensor: Tensor) -> None:
            target.copy_(tensor)

        return WeightSlot((self.parts[part],), load)


@dataclass(frozen=True)
class LinearFactory:
    """Makes all linears of one model, in its dtype and on its device."""

    dtype: torch.dtype
    device: torch.device

    def column(self, in_features: int, *out_features: int, bias: bool = False) -> Linear:
        """A linear split by output features. Several `out_features` are merged into one product."""
        return self._make(in_features, out_features, Split.COLUMN, bias)

    def row(self, in_features: int, out_features: int, *, bias: bool = False) -> Linear:
        """A linear split by input features: it reads what a column-split linear wrote."""
        return self._make(in_features, (out_features,), Split.ROW, bias)

    def replicated(self, in_features: int, out_features: int) -> Linear:
        """A linear that every rank computes whole (routers, gates)."""
        return self._make(in_features, (out_features,), Split.REPLICATED, bias=False)

    def _make(self, in_features: int, parts: tuple[int, ...], split: Split, bias: bool) -> Linear:
        layout = packing.PackedWeight if packing.supports(self.dtype, self.device) else DenseWeight
        weight: LinearWeight = layout(in_features, parts, self.dtype, self.device)
        zeros = torch.zeros(sum(parts), dtype=self.dtype, device=self.device) if bias else None
        return Linear(in_features, parts, split, weight, zeros)
