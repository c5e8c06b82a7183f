"""The product of one row with a plain weight on GPUs, in Triton: threads multiply along the
columns, and the weight is read once. Importing this needs the package `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton_launch import kernel

TILE = 2  # outputs of a program of four warps
WIDTH = 1024  # columns that it multiplies at a time
RUN = 8  # columns that one thread loads together


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [1, columns] Wᵀ + bias → [1, outputs], with float32 sums. All are of one dtype; weight
    [outputs, columns], contiguous."""
    (_, columns), outputs = x.shape, len(weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = x.new_empty(1, outputs)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _product(
            (triton.cdiv(outputs, TILE),),
            x,
            weight,
            y if bias is None else bias,
            y,
            outputs,
            columns,
            biased=bias is not None,
            tile=TILE,
            width=WIDTH,
            run=RUN,
        )
    return y


@kernel
def _product(
    x,
    weight,
    bias,
    y,
    outputs,
    columns,
    biased: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
    run: tl.constexpr,
):
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    k = tl.arange(0, width)
    real = n < outputs
    weights = weight + n.to(tl.int64)[:, None] * columns
    totals = tl.zeros((tile, width // run), tl.float32)
    for start in range(0, columns, width):
        inside = start + k < columns
        w = tl.load(
            weights + (start + k)[None, :], mask=real[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        row = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        totals += tl.sum(tl.reshape(w * row[None, :], (tile, width // run, run)), axis=2)
    total = tl.sum(totals, axis=1)
    if biased:
        total += tl.load(bias + n, mask=real, other=0.0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), mask=real)
