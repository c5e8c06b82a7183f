"""Storage of the projections of a mixture's experts: the interface, and two layouts.

A layout holds one projection of all experts of a layer, or several that are merged (gate, up). On
the CPU each expert has a linear of its own; on accelerators the weights of all experts are stacked,
and one product runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels import gpu, mixture
from worker.layers.linear import Linear, LinearFactory, Share
from worker.layers.transfer import is_accelerator, read_back
from worker.layers.weights.bf16 import Bf16Weight
from worker.layers.weights.integer import IntegerWeight
from worker.layers.weights.linear_weight import GroupedProduct
from worker.layers.weights.quantised_tensor import Weight
from worker.layers.weights.slot import WeightSlot
from worker.layers.weights.storage import StackedWeights


class ExpertLinears(Protocol):
    """One linear per expert, yₑ = xₑ Wₑᵀ + bₑ, in some layout. Every Wₑ is [sum(parts),
    in_features], merged from one or more checkpoint tensors as in `Linear`."""

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [rows, in_features], the rows of each expert together, in the order of the experts;
        counts [experts], the rows of each → [rows, sum(parts)]."""

    def weight_slot(self, expert: int, part: int = 0) -> WeightSlot:
        """Slot of one merged tensor of an expert [parts[part], in_features]."""

    def bias_slot(self, expert: int, part: int = 0) -> WeightSlot:
        """Slot of one merged bias of an expert [parts[part]]."""


class SeparateLinears:
    """One `Linear` per expert, in the layout that the linear chooses. One call of the CPU kernels
    multiplies with all of them, where it can."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = linears

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        if self._grouped is not None:
            y = self._grouped(x, counts)
            if self._biases is None:
                return y
            return mixture.add_biases(y, self._biases, counts)
        rows = read_back(counts)
        used = [(linear, n) for linear, n in zip(self._linears, rows, strict=True) if n]
        pieces = zip(used, x.split([n for _, n in used]), strict=True)
        return torch.cat([linear(part) for (linear, _), part in pieces])

    @cached_property
    def _grouped(self) -> GroupedProduct | None:
        """The product with all weights, once they are loaded."""
        weights = [linear.weight for linear in self._linears]
        plain = [weight for weight in weights if isinstance(weight, Bf16Weight)]
        packed = [weight for weight in weights if isinstance(weight, IntegerWeight)]
        if len(plain) == len(weights):
            return Bf16Weight.grouped(plain)
        if len(packed) == len(weights):
            return IntegerWeight.grouped(packed)
        return None

    @cached_property
    def _biases(self) -> Tensor | None:
        """[experts, out_features], once they are loaded."""
        biases = [linear.bias for linear in self._linears]
        given = [bias for bias in biases if bias is not None]
        return torch.stack(given) if given else None

    def weight_slot(self, expert: int, part: int = 0) -> WeightSlot:
        return self._linears[expert].weight_slot(part)

    def bias_slot(self, expert: int, part: int = 0) -> WeightSlot:
        return self._linears[expert].bias_slot(part)


class GroupedLinears:
    """All weights in the layouts of `StackedWeights`, and all biases in one tensor. `share`: the
    part of each expert that this rank has."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        parts: tuple[int, ...],
        bias: bool,
        share: Share,
        of: LinearFactory,
    ) -> None:
        self._in_features, self._parts, self._share = in_features, parts, share
        self._compressed = of.compressed
        self._arrived: dict[int, dict[int, Weight]] = {}  # of experts that lack some of their parts
        self._weights = StackedWeights(
            experts, of.dtype, of.device, keep_quantised=of.keep_quantised
        )
        shape = (experts, sum(share.sizes(parts)))
        self._bias = torch.zeros(shape, dtype=of.dtype, device=of.device) if bias else None

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        y = self._weights(x, counts)
        if self._bias is None:
            return y
        if gpu.serves(y):
            added: Tensor = gpu.mixture().add_biases(y, self._bias, counts)
            return added
        return y + self._bias.repeat_interleave(counts, dim=0, output_size=len(x))

    def weight_slot(self, expert: int, part: int = 0) -> WeightSlot:
        def load(tensor: Weight) -> None:
            arrived = self._arrived.setdefault(expert, {})
            arrived[part] = self._share.weight(part, tensor)
            if len(arrived) == len(self._parts):
                del self._arrived[expert]
                merged = [arrived[index] for index in range(len(self._parts))]
                self._weights.put(expert, self._compressed(merged))

        shape = (self._parts[part], self._in_features)
        return WeightSlot(shape, load, load_quantised=load)

    def bias_slot(self, expert: int, part: int = 0) -> WeightSlot:
        assert self._bias is not None
        return self._share.bias_slot(part, self._parts, self._bias[expert])


@dataclass(frozen=True)
class ExpertFactory:
    """Makes the projections of the `experts` of one layer, with the methods of `LinearFactory`."""

    experts: int
    linears: LinearFactory

    def column(self, in_features: int, *out_features: int, bias: bool = False) -> ExpertLinears:
        """Split by output features. Several `out_features` are merged into one product."""
        linears = self.linears
        if self._grouped:
            share = linears.column_share(out_features)
            return GroupedLinears(self.experts, in_features, out_features, bias, share, linears)
        return SeparateLinears(
            [linears.column(in_features, *out_features, bias=bias) for _ in range(self.experts)]
        )

    def row(self, in_features: int, out_features: int, *, bias: bool = False) -> ExpertLinears:
        """Split by input features. What ranks compute is not summed."""
        linears = self.linears
        if self._grouped:
            share = linears.row_share(in_features, out_features)
            return GroupedLinears(self.experts, in_features, (out_features,), bias, share, linears)
        return SeparateLinears(
            [
                linears.row(in_features, out_features, bias=bias, summed=False)
                for _ in range(self.experts)
            ]
        )

    @property
    def _grouped(self) -> bool:
        return runs_grouped(self.linears.built_for or self.linears.device)


def runs_grouped(device: torch.device) -> bool:
    """True if the grouped product is the faster layout."""
    return is_accelerator(device)
