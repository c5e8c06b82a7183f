"""A linear's weight as one plain tensor, multiplied by torch, or by a Triton kernel on GPUs; memory
for weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import gpu, weight_memory

# On a CPU without bf16 instructions torch multiplies bf16 about ten times as slowly as float32.
# From WIDENED_ROWS on it is faster to convert the weight, WIDENED_VALUES at a time, to float32.
WIDENED_ROWS, WIDENED_VALUES = 8, 1 << 22


class DenseWeight:
    """One tensor [out_features, in_features]."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._rows_alone = weight.is_contiguous() and gpu.multiplies_one_row(weight)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) == 1 and self._rows_alone:
            y: Tensor = gpu.dense().product(x, self._weight, bias)
            return y
        return linear(x, self._weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [rows, in_features] → x Wᵀ + bias [rows, out_features] by torch, rounded once."""
    if len(x) < WIDENED_ROWS or not (weight.is_cpu and x.dtype is torch.bfloat16) or bf16_is_fast():
        return F.linear(x, weight, bias)
    y = x.new_empty(len(x), len(weight))
    wide, step = x.float(), max(1, WIDENED_VALUES // weight.shape[1])
    for start in range(0, len(weight), step):
        part = slice(start, start + step)
        y[:, part] = F.linear(
            wide, weight[part].float(), None if bias is None else bias[part].float()
        )
    return y


@cache
def bf16_is_fast() -> bool:
    """True if torch multiplies bf16 with oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def merge(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensors [n, in_features] concatenated along their rows. A single tensor that has the
    right dtype and device is returned as it is, without a copy."""
    if len(parts) == 1:
        return parts[0].to(device=device, dtype=dtype)
    sizes = [len(part) for part in parts]
    merged = empty((sum(sizes), parts[0].shape[1]), dtype, device)
    for target, part in zip(merged.split(sizes), parts, strict=True):
        target.copy_(part)
    return merged


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a weight."""
    if device.type == "cpu":
        return weight_memory.empty(shape, dtype)
    return torch.empty(*shape, dtype=dtype, device=device)
