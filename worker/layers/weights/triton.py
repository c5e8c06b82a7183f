"""Weights in quantised blocks, multiplied by the Triton kernels on GPUs: those of a linear, and of
one projection of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from worker.kernels import gpu
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight
from worker.layers.weights.stacked import multiply, rows_of_product

# Values of the weight that are dequantised for one product of a large batch, 128 MiB in bf16. With
# fewer, a product is too small for the device.
LARGE_PRODUCT_VALUES = 1 << 26


def kernels() -> Any:
    """`worker.kernels.triton_products`, or None where Triton can't start them."""
    return gpu.products() if gpu.usable() else None


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


class TritonStack:
    """[out_features, in_features] of each expert as the tensors that are merged along its rows: one
    matrix of all experts for neighbours of one type. Few rows are multiplied by a kernel that
    unpacks within the product, more and float32 with weights that are dequantised in pieces."""

    def __init__(
        self, experts: int, parts: Sequence[QuantisedTensor], device: torch.device
    ) -> None:
        self._experts, columns = experts, parts[0].shape[1]
        self._runs: list[tuple[GGMLQuantizationType, Any]] = []  # types, and planes of all experts
        for kind, run in groupby(parts, key=lambda part: part.type):
            rows = experts * sum(part.shape[0] for part in run)
            self._runs.append((kind, kernels().empty(kind.name, rows, columns, device)))
        self._out_features = sum(part.shape[0] for part in parts)
        self._rows = rows_of_product(LARGE_PRODUCT_VALUES, experts, columns)

    def put(self, expert: int, parts: Sequence[Weight]) -> None:
        given = [part for part in parts if isinstance(part, QuantisedTensor)]
        runs = groupby(given, key=lambda part: part.type)
        for (kind, planes), (given_kind, run) in zip(self._runs, runs, strict=True):
            assert kind is given_kind, "experts of one projection have several types"
            blocks = torch.cat([part.blocks.to(planes.low.device) for part in run])
            planes.fill(expert * len(blocks), blocks)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        triton = kernels()
        y = x.new_empty(len(x), self._out_features)
        start = 0
        for _, planes in self._runs:
            outputs = planes.rows // self._experts
            part = y[:, start : start + outputs]
            if triton.multiplies_grouped(x, self._experts):
                triton.grouped_product(x, counts, planes, part)
            else:
                for first in range(0, outputs, self._rows):
                    last = min(first + self._rows, outputs)
                    some = triton.dequantise(planes, first, last, x.dtype, self._experts)
                    some = some.view(self._experts, last - first, -1)
                    part[:, first:last] = multiply(x, some, counts)
            start += outputs
        return y
