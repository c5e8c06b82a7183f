"""Linear layers: shape, split direction and checkpoint slots. The storage is a `LinearWeight`.

A model makes its linears through `LinearFactory`, whose methods name the direction in which tensor
parallelism may split the weight. All linears are computed whole at present. The factory chooses a
linear's storage when its checkpoint tensors are there, by what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from worker.layers.weights.linear_weight import LinearWeight
from worker.layers.weights.quantised_tensor import Compress, QuantisedTensor, Weight
from worker.layers.weights.slot import WeightSlot
from worker.layers.weights.storage import store_linear

# Makes the storage of a linear from the tensors that are merged in it, in order.
Store = Callable[[Sequence[Weight]], LinearWeight]


class Split(Enum):
    """The split of a linear's weight [out_features, in_features] across tensor-parallel ranks
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
        store: Store,
        bias: Tensor | None,
    ) -> None:
        self.in_features, self.out_features = in_features, sum(parts)
        self.parts, self.split = parts, split
        self._store, self._bias = store, bias
        self._arrived: dict[int, Weight] = {}  # until all parts are there
        self._weight: LinearWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] → [rows, out_features], in the layer's dtype."""
        assert self._weight is not None, "the weight is not loaded"
        return self._weight(x, self._bias)

    @property
    def weight(self) -> LinearWeight | None:
        """The storage of the weight, once it is loaded."""
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """[out_features]."""
        return self._bias

    def weight_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one merged tensor [parts[part], in_features]."""

        def load(tensor: Weight) -> None:
            self._arrived[part] = tensor
            if len(self._arrived) == len(self.parts):
                arrived, self._arrived = self._arrived, {}
                self._weight = self._store([arrived[index] for index in range(len(self.parts))])

        return WeightSlot((self.parts[part], self.in_features), load, load_quantised=load)

    def merged_slot(self) -> WeightSlot:
        """Slot of a checkpoint tensor [out_features, in_features] that holds all parts in order."""

        def load(tensor: Weight) -> None:
            start = 0
            for part, rows in enumerate(self.parts):
                self.weight_slot(part).fill(tensor[start : start + rows])
                start += rows

        shape = (self.out_features, self.in_features)
        return WeightSlot(shape, load, load_quantised=load)

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
    """Makes all linears of one model, in its dtype and on its device. `compress` is applied to the
    plain weights of all but the replicated ones. `built_for`: the device whose layouts are chosen,
    if `device` only stands in for it. Blocks of types that no kernel multiplies with are
    re-encoded, unless `keep_quantised`."""

    dtype: torch.dtype
    device: torch.device
    compress: Compress | None = None
    built_for: torch.device | None = None
    keep_quantised: bool = False

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
        zeros = torch.zeros(sum(parts), dtype=self.dtype, device=self.device) if bias else None
        whole = split is Split.REPLICATED
        return Linear(in_features, parts, split, self._store if whole else self._compressed, zeros)

    def _compressed(self, parts: Sequence[Weight]) -> LinearWeight:
        if self.compress is None:
            return self._store(parts)
        return self._store(
            [p if isinstance(p, QuantisedTensor) else self.compress(p) for p in parts]
        )

    def _store(self, parts: Sequence[Weight]) -> LinearWeight:
        return store_linear(parts, self.dtype, self.device, keep_quantised=self.keep_quantised)
