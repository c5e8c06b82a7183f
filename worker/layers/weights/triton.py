"""A linear's weight in quantised blocks, multiplied by the Triton kernels on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from worker.kernels import gpu
from worker.layers.weights.quantised_tensor import QuantisedTensor

# Values of the weight that are dequantised for one product of a large batch, 128 MiB in bf16. With
# fewer, a product is too small for the device.
LARGE_PRODUCT_VALUES = 1 << 26


def kernels() -> Any:
    """`worker.kernels.triton_products`, or None without the package `triton`."""
    return gpu.products() if gpu.package() else None


def multiplies(kind: GGMLQuantizationType) -> bool:
    """True if the kernels multiply with blocks of this type."""
    return kernels() is not None and kind.name in kernels().FORMATS


class TritonWeight:
    """[out_features, in_features] as the tensors that are merged along its rows. Neighbours of one
    type are one product."""

    def __init__(self, parts: Sequence[QuantisedTensor]) -> None:
        self._parts = [
            kernels().pack(kind.name, torch.cat([part.blocks for part in run]))
            for kind, run in groupby(parts, key=lambda part: part.type)
        ]
        self._out_features = sum(part.shape[0] for part in parts)
        # Of the weight, dequantised at a time.
        self._rows = max(1, LARGE_PRODUCT_VALUES // parts[0].shape[1])

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        triton = kernels()
        y = x.new_empty(len(x), self._out_features)
        start = 0
        for planes in self._parts:
            end = start + planes.rows
            if triton.multiplies(x):
                triton.product(x, planes, y[:, start:end])
            else:
                for first in range(0, planes.rows, self._rows):
                    last = min(first + self._rows, planes.rows)
                    some = triton.dequantise(planes, first, last, x.dtype)
                    y[:, start + first : start + last] = x @ some.T
            start = end
        return y if bias is None else y.add_(bias)
