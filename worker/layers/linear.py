"""Linear layers: shape, split direction and checkpoint slots. The storage is a `LinearWeight`.

A model makes its linears through `LinearFactory`, whose methods name the direction in which tensor
parallelism splits the weight. With several ranks, slots take whole checkpoint tensors and keep the
part of this rank. The factory chooses a linear's storage when its checkpoint tensors are there, by
what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.shard import WHOLE, Shard
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


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of one merged tensor [out_features, in_features] that a rank has. `padding`: rows of
    zeros below it."""

    rows: slice
    columns: slice
    padding: int = 0

    @property
    def count(self) -> int:
        """Its rows."""
        return int(self.rows.stop - self.rows.start) + self.padding

    def weight(self, tensor: Tensor) -> Tensor:
        part = tensor[self.rows, self.columns].contiguous()
        return F.pad(part, (0, 0, 0, self.padding)) if self.padding else part

    def bias(self, tensor: Tensor) -> Tensor:
        part = tensor[self.rows]
        return F.pad(part, (0, self.padding)) if self.padding else part


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a linear that one rank has. `cuts`: that of each merged tensor; None: all of it.
    `adds_bias`: False if another rank adds it to the sum."""

    cuts: Sequence[Cut] | None = None
    adds_bias: bool = True

    def sizes(self, parts: Sequence[int]) -> Sequence[int]:
        """The output features that this rank has of each merged tensor."""
        return parts if self.cuts is None else [cut.count for cut in self.cuts]

    def weight(self, part: int, tensor: Weight) -> Weight:
        if self.cuts is None:
            return tensor
        assert isinstance(tensor, Tensor), "quantised blocks are not split"
        return self.cuts[part].weight(tensor)

    def bias_slot(self, part: int, parts: Sequence[int], bias: Tensor) -> WeightSlot:
        """Slot of one merged bias [parts[part]], of which this rank's part goes to its place in
        `bias` [sum(sizes)]."""
        sizes = self.sizes(parts)
        target = bias[sum(sizes[:part]) : sum(sizes[: part + 1])]

        def load(tensor: Tensor) -> None:
            if self.adds_bias:
                target.copy_(tensor if self.cuts is None else self.cuts[part].bias(tensor))

        return WeightSlot((parts[part],), load)


WHOLE_SHARE = Share()


class Linear:
    """y = x Wᵀ + b, with W [sum(parts), in_features] merged from one or more checkpoint tensors.

    `parts` are the output features of the merged tensors in order (q, k, v or gate, up). `share`:
    the part of them that this rank has. `shard`: sums the ranks' outputs.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        split: Split,
        store: Store,
        bias: Tensor | None,
        *,
        share: Share = WHOLE_SHARE,
        shard: Shard = WHOLE,
    ) -> None:
        self.in_features, self.out_features = in_features, sum(parts)
        self.parts, self.split = parts, split
        self._store, self._bias = store, bias
        self._share, self._shard = share, shard
        self._arrived: dict[int, Weight] = {}  # until all parts are there
        self._weight: LinearWeight | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in_features] → [rows, out_features], in the layer's dtype; of several ranks,
        with the features that this one has."""
        assert self._weight is not None, "the weight is not loaded"
        return self._shard.sum(self._weight(x, self._bias))

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
            self._arrived[part] = self._share.weight(part, tensor)
            if len(self._arrived) == len(self.parts):
                arrived, self._arrived = self._arrived, {}
                self._weight = self._store([arrived[index] for index in range(len(self.parts))])

        return WeightSlot((self.parts[part], self.in_features), load, load_quantised=load)

    def merged_slot(self, parts: Sequence[int] | None = None) -> WeightSlot:
        """Slot of a checkpoint tensor [rows, in_features] that holds some parts in order, or all of
        them."""
        held = range(len(self.parts)) if parts is None else parts

        def load(tensor: Weight) -> None:
            start = 0
            for part in held:
                rows = self.parts[part]
                self.weight_slot(part).fill(tensor[start : start + rows])
                start += rows

        shape = (sum(self.parts[part] for part in held), self.in_features)
        return WeightSlot(shape, load, load_quantised=load)

    def bias_slot(self, part: int = 0) -> WeightSlot:
        """Slot of one merged bias [parts[part]]."""
        assert self._bias is not None
        return self._share.bias_slot(part, self.parts, self._bias)


@dataclass(frozen=True)
class LinearFactory:
    """Makes all linears of one model, in its dtype and on its device. `compress` is applied to the
    plain weights of all but the replicated ones. `built_for`: the device whose layouts are chosen,
    if `device` only stands in for it. Blocks of types that no kernel multiplies with are
    re-encoded, unless `keep_quantised`. `shard`: the part of the model that is made."""

    dtype: torch.dtype
    device: torch.device
    compress: Compress | None = None
    built_for: torch.device | None = None
    keep_quantised: bool = False
    shard: Shard = WHOLE

    def column(
        self,
        in_features: int,
        *out_features: int,
        bias: bool = False,
        heads: Sequence[int] | None = None,
    ) -> Linear:
        """A linear split by output features. Several `out_features` are merged into one product.
        `heads`: in how many each of them consists, which stay whole; ranks share them where there
        are fewer. Raises Indivisible."""
        share = self.column_share(out_features, heads)
        return self._make(in_features, out_features, Split.COLUMN, bias, share)

    def vocabulary(self, in_features: int, out_features: int) -> Linear:
        """A linear split by output features, which need not divide: each rank has the same number,
        and those beyond `out_features` are 0."""
        shard, share = self.shard, WHOLE_SHARE
        if not shard.whole:
            rows = shard.padded_part(out_features)
            padding = shard.padded_length(out_features) - (rows.stop - rows.start)
            share = Share([Cut(rows, slice(None), padding)])
        return self._make(in_features, (out_features,), Split.COLUMN, False, share)

    def row(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        heads: int | None = None,
        summed: bool = True,
    ) -> Linear:
        """A linear split by input features: it reads what a column-split linear wrote. `heads`: in
        how many these consist. Unless `summed`, the caller sums what the ranks compute. Raises
        Indivisible."""
        share = self.row_share(in_features, out_features, heads)
        return self._make(in_features, (out_features,), Split.ROW, bias, share, summed=summed)

    def replicated(self, in_features: int, out_features: int) -> Linear:
        """A linear that every rank computes whole (routers, gates)."""
        return self._make(in_features, (out_features,), Split.REPLICATED, False, WHOLE_SHARE)

    def column_share(
        self, out_features: Sequence[int], heads: Sequence[int] | None = None
    ) -> Share:
        """This rank's part of a linear that is split as by `column`. Raises Indivisible."""
        if self.shard.whole:
            return WHOLE_SHARE
        named = "channels" if heads is None else "heads"
        counts = zip(out_features, heads or out_features, strict=True)
        return Share(
            [
                Cut(self.shard.part(n, units, named, replicate=heads is not None), slice(None))
                for n, units in counts
            ]
        )

    def row_share(self, in_features: int, out_features: int, heads: int | None = None) -> Share:
        """This rank's part of a linear that is split as by `row`. Raises Indivisible."""
        if self.shard.whole:
            return WHOLE_SHARE
        named = "channels" if heads is None else "heads"
        columns = self.shard.part(in_features, heads or in_features, named)
        return Share([Cut(slice(0, out_features), columns)], adds_bias=self.shard.rank == 0)

    def _make(
        self,
        in_features: int,
        parts: tuple[int, ...],
        split: Split,
        bias: bool,
        share: Share,
        *,
        summed: bool = False,
    ) -> Linear:
        rows = sum(share.sizes(parts))
        return Linear(
            in_features,
            parts,
            split,
            self._store if split is Split.REPLICATED else self._store_compressed,
            torch.zeros(rows, dtype=self.dtype, device=self.device) if bias else None,
            share=share,
            shard=self.shard if summed else WHOLE,
        )

    def compressed(self, parts: Sequence[Weight]) -> Sequence[Weight]:
        """The plain ones of the tensors in blocks, if `compress` makes some."""
        if self.compress is None:
            return parts
        return [p if isinstance(p, QuantisedTensor) else self.compress(p) for p in parts]

    def _store_compressed(self, parts: Sequence[Weight]) -> LinearWeight:
        return self._store(self.compressed(parts))

    def _store(self, parts: Sequence[Weight]) -> LinearWeight:
        return store_linear(parts, self.dtype, self.device, keep_quantised=self.keep_quantised)
