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
    """True if the kernel multiplies with bf16 matrices of this shape."""
    return outputs >= UNIT and columns % STEP == 0 and library.active() is not None


class Matrices:
    """bf16 weights [outputs, columns] of one shape, as `linear` reads them."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights  # keeps their memory
        self.count, self.outputs = len(weights), len(weights[0])
        self.table = (c_int64 * len(weights))(*(weight.data_ptr() for weight in weights))


def linear(x: Tensor, weights: Matrices, counts: Tensor | None = None) -> Tensor:
    """x Wᵀ in bf16: x [rows, columns] → [rows, outputs]. `counts`, int64 on the CPU: how many rows
    belong to each matrix, in order; None: all belong to the only one."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    y = torch.empty(rows, weights.outputs, dtype=torch.bfloat16)
    tiles = rows // TILE_ROWS + min(rows, weights.count)  # at most
    scratch = torch.empty(tiles * TILE_ROWS * (columns + PADDING), dtype=torch.float32)
    library.require().dense_linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        columns,
        weights.table,
        None if counts is None else counts.data_ptr(),
        weights.count,
        y.data_ptr(),
        weights.outputs,
        scratch.data_ptr(),
        library.multiplies_pairs(),
        torch.get_num_threads(),
    )
    return y
