"""A linear's weight in quantised blocks, multiplied by torch: each product dequantises the weight
again, a few of its rows at a time."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker.layers.transfer import is_accelerator
from worker.layers.weights.dense import linear
from worker.layers.weights.quantised_tensor import QuantisedTensor

# Values of the weight that are dequantised for one product, on the CPU and elsewhere. Larger
# products take more memory.
PRODUCT_VALUES, ACCELERATOR_PRODUCT_VALUES = 1 << 18, 1 << 24


class DequantisingWeight:
    """[out_features, in_features] as the tensors that are merged along its rows, each in blocks of
    its own type."""

    def __init__(self, parts: Sequence[QuantisedTensor]) -> None:
        self._pieces = [piece for part in parts for piece in _pieces(part)]
        self._out_features = sum(part.shape[0] for part in parts)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x.new_empty(len(x), self._out_features)
        start = 0
        for piece in self._pieces:
            end = start + piece.shape[0]
            y[:, start:end] = linear(x, piece.dequantise(x.dtype))
            start = end
        return y if bias is None else y.add_(bias)


def _pieces(part: QuantisedTensor) -> list[QuantisedTensor]:
    """`part` split by rows into views of at most PRODUCT_VALUES values."""
    rows, columns = part.shape
    chunk = ACCELERATOR_PRODUCT_VALUES if is_accelerator(part.device) else PRODUCT_VALUES
    step = max(1, chunk // columns)
    return [part[start : start + step] for start in range(0, rows, step)]
