"""Products with plain bf16 weights: `src/dense.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch
from torch import Tensor

from worker.kernels import library

STEP = 32  # columns are a multiple of this
UNIT = 32  # outputs of a unit of work: a matrix has at least as many
TILE_ROWS = 16  # rows of x that are packed together
PADDING = 16  # columns in float32, see dense_linear in src/dense.cpp


def serves(outputs: int, columns: int) -> bool:
    """Whether the kernel multiplies with bf16 matrices of this shape."""
    return outputs >= UNIT and columns % STEP == 0 and library.active() is not None


def linear(x: Tensor, weights: Sequence[tuple[Tensor, int]]) -> Tensor:
    """x Wᵀ in bf16: x [rows, columns] has, for each weight [outputs, columns] in order, that many
    rows → [rows, outputs]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    outputs = weights[0][0].shape[0]
    y = torch.empty(rows, outputs, dtype=torch.bfloat16)
    tiles = sum(-(-count // TILE_ROWS) for _, count in weights)
    scratch = torch.empty(tiles * TILE_ROWS * (columns + PADDING), dtype=torch.float32)
    table = [fact for weight, count in weights for fact in (weight.data_ptr(), count)]
    library.require().dense_linear(
        x.data_ptr(),
        x.stride(0),
        columns,
        (c_int64 * len(table))(*table),
        len(weights),
        y.data_ptr(),
        outputs,
        scratch.data_ptr(),
        library.multiplies_pairs(),
        torch.get_num_threads(),
    )
    return y
