"""A linear's weight in quantised blocks, multiplied by the CPU kernels in integers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker.kernels import quantised as kernels
from worker.layers.weights.linear_weight import GroupedProduct
from worker.layers.weights.quantised_tensor import QuantisedTensor


class IntegerWeight:
    """[out_features, in_features] as the tensors that are merged along its rows, packed for the
    kernels. Products round x to int8 with one scale per row and 32 channels."""

    def __init__(self, parts: Sequence[QuantisedTensor]) -> None:
        self._parts = [_pack(part) for part in parts]
        self._matrices = kernels.Matrices([self._parts])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = kernels.linear(x, self._matrices)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def grouped(weights: Sequence[IntegerWeight]) -> GroupedProduct:
        """One product with the rows of each of the weights, which are merged alike."""
        matrices = kernels.Matrices([weight._parts for weight in weights])
        return lambda x, counts: kernels.linear(x, matrices, counts)


def _pack(part: QuantisedTensor) -> kernels.PackedBlocks:
    rows, columns = part.shape
    return kernels.pack(part.type.name, rows, columns, part.blocks)
