"""A linear's weight in quantised blocks, multiplied by the Triton kernels on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf import GGMLQuantizationType
from torch import Tensor

from worker.kernels import gpu
from worker.layers.weights.quantised_tensor import QuantisedTensor

# Values of the weight that are dequantised for one product of a large batch.
LARGE_PRODUCT_VALUES = 1 << 24


def kernels() -> Any:
    """`worker.kernels.triton_products`, or None without the package `triton`."""
    return gpu.products() if gpu.package() else None


def multiplies(kind: GGMLQuantizationType) -> bool:
    """True if the kernels multiply with blocks of this type."""
    return kernels() is not None and kind.name in kernels().FORMATS


class TritonWeight:
    """[out_features, in_features] as the tensors that are merged along its rows, each in blocks of
    its own type on the device."""

    def __init__(self, parts: Sequence[QuantisedTensor]) -> None:
        self._parts = [(part.type.name, part.blocks.contiguous()) for part in parts]
        self._out_features = sum(part.shape[0] for part in parts)
        # Of the weight, dequantised at a time.
        self._rows = max(1, LARGE_PRODUCT_VALUES // parts[0].shape[1])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        triton = kernels()
        y = x.new_empty(len(x), self._out_features)
        start = 0
        for kind, blocks in self._parts:
            end = start + len(blocks)
            if len(x) <= triton.MAX_ROWS:
                triton.product(x, kind, blocks, y[:, start:end])
            else:
                for first in range(0, len(blocks), self._rows):
                    some = blocks[first : first + self._rows]
                    here = slice(start + first, start + first + len(some))
                    y[:, here] = x @ triton.dequantise(kind, some, x.dtype).T
            start = end
        return y if bias is None else y.add_(bias)
