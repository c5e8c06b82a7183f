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
# Rows that are multiplied as they are: a token and the 4 guesses after it have the bits that they
# have one by one. More where products of pairs are slow, since tiles compute 16 rows in any case.
FEW, FEW_BY_SLOW_PAIRS = 5, 12


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
    fast = library.multiplies_pairs()
    # Weights are widened to float32 for each call, which pays from two tiles on.
    pairs = fast or rows <= TILE_ROWS * len(weights)
    packed = torch.bfloat16 if pairs else torch.float32
    scratch = torch.empty(tiles * TILE_ROWS * columns, dtype=packed)
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
        FEW if fast else FEW_BY_SLOW_PAIRS,
        pairs,
        torch.get_num_threads(),
    )
    return y
