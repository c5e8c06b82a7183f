"""Products with quantised weights on GPUs, in Triton: small batches dequantise inside the product,
so that only the blocks are read; large ones multiply with `dequantise`'s output.

Importing this needs the package `triton`, which torch's CUDA builds for Linux bring along. Fields
of a block are named as in ggml.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16  # of x in `product`: the fewest that a tensor core multiplies
TILE = 16  # outputs of one program
STEP = 256  # columns that it dequantises at a time: one block or several

Q4_0, Q8_0, Q4_K, Q5_K, Q6_K = (tl.constexpr(code) for code in range(5))


@dataclass(frozen=True, slots=True)
class Format:
    """A type of GGUF blocks: its code here, and the values and bytes of a block."""

    code: int
    values: int
    size: int


FORMATS = {
    "Q4_0": Format(0, 32, 18),
    "Q8_0": Format(1, 32, 34),
    "Q4_K": Format(2, 256, 144),
    "Q5_K": Format(3, 256, 176),
    "Q6_K": Format(4, 256, 210),
}


def product(x: Tensor, format_name: str, blocks: Tensor, y: Tensor) -> None:
    """y = x Wᵀ. x [rows, columns] in a floating-point dtype, at most MAX_ROWS; blocks uint8
    [outputs, bytes per row], contiguous; y [rows, outputs] in x's dtype, whose rows may be part of
    longer ones. W is rounded to x's dtype, as `dequantise` does, and sums are float32."""
    form, (rows, columns), outputs = FORMATS[format_name], x.shape, len(blocks)
    x = x if x.stride(1) == 1 else x.contiguous()
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _product[(triton.cdiv(outputs, TILE),)](
            x,
            blocks,
            blocks.view(torch.float16),
            y,
            rows,
            outputs,
            columns,
            x.stride(0),
            y.stride(0),
            kind=form.code,
            values=form.values,
            size=form.size,
            most_rows=MAX_ROWS,
            tile=TILE,
            step=STEP,
        )


def dequantise(format_name: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [rows, bytes per row], contiguous → their values [rows, columns], computed in
    float32 and rounded to `dtype`."""
    form, (rows, row_bytes) = FORMATS[format_name], blocks.shape
    columns = row_bytes // form.size * form.values
    output = torch.empty(rows, columns, dtype=dtype, device=blocks.device)
    with torch.cuda.device_of(blocks):
        _dequantise[(triton.cdiv(rows, TILE), triton.cdiv(columns, STEP))](
            blocks,
            blocks.view(torch.float16),
            output,
            rows,
            columns,
            kind=form.code,
            values=form.values,
            size=form.size,
            tile=TILE,
            step=STEP,
        )
    return output


@triton.jit
def _product(
    x,
    blocks,
    halves,
    y,
    rows,
    outputs,
    columns,
    x_stride,
    y_stride,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    most_rows: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
):
    m = tl.arange(0, most_rows)[:, None]
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    total = tl.zeros((most_rows, tile), tl.float32)
    for start in range(0, columns, step):
        k = start + tl.arange(0, step)[None, :]
        inputs = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < columns), other=0.0)
        weights = _tile(blocks, halves, n[:, None], k, outputs, columns, kind, values, size)
        total += tl.dot(inputs, tl.trans(weights.to(inputs.dtype)), input_precision="ieee")
    n = n[None, :]
    tl.store(y + m * y_stride + n, total.to(y.dtype.element_ty), mask=(m < rows) & (n < outputs))


@triton.jit
def _dequantise(
    blocks,
    halves,
    output,
    rows,
    columns,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
):
    n = (tl.program_id(0) * tile + tl.arange(0, tile))[:, None]
    k = (tl.program_id(1) * step + tl.arange(0, step))[None, :]
    weights = _tile(blocks, halves, n, k, rows, columns, kind, values, size)
    to = output + n.to(tl.int64) * columns + k
    tl.store(to, weights.to(output.dtype.element_ty), mask=(n < rows) & (k < columns))


@triton.jit
def _tile(
    blocks,
    halves,
    n,
    k,
    rows,
    columns,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
):
    """The float32 values at rows n [tile, 1] and columns k [1, step]; 0 outside the matrix."""
    real = (n < rows) & (k < columns)
    at = n.to(tl.int64) * (columns // values * size) + k // values * size  # a block's first byte
    j = k % values
    if kind == Q8_0:
        weights = _half(halves, at, real) * _signed(blocks + at + 2 + j, real)
    elif kind == Q4_0:
        q = _byte(blocks + at + 2 + j % 16, real) >> (j // 16 * 4) & 15
        weights = _half(halves, at, real) * (q - 8).to(tl.float32)
    elif kind == Q6_K:
        part, i = j // 128, j % 128
        low = _byte(blocks + at + part * 64 + i % 64, real) >> (i // 64 * 4) & 15
        high = _byte(blocks + at + 128 + part * 32 + i % 32, real) >> (i // 32 * 2) & 3
        scale = _half(halves, at + 208, real) * _signed(blocks + at + 192 + j // 16, real)
        weights = scale * ((low | high << 4) - 32).to(tl.float32)
    else:
        part = j // 32  # each has a scale and a minimum of 6 bits
        first = _byte(blocks + at + 4 + part % 4, real)
        second = _byte(blocks + at + 8 + part % 4, real)
        last = _byte(blocks + at + 12 + part % 4, real)
        low = part < 4
        scale = tl.where(low, first & 63, last & 15 | first >> 2 & 48)
        minimum = tl.where(low, second & 63, last >> 4 | second >> 2 & 48)
        nibbles = 48 if kind == Q5_K else 16
        q = _byte(blocks + at + nibbles + part // 2 * 32 + j % 32, real) >> (part % 2 * 4) & 15
        if kind == Q5_K:
            q = q | (_byte(blocks + at + 16 + j % 32, real) >> part & 1) << 4
        scaled = _half(halves, at, real) * scale.to(tl.float32) * q.to(tl.float32)
        weights = scaled - _half(halves, at + 2, real) * minimum.to(tl.float32)
    return weights


@triton.jit
def _byte(pointer, real):
    return tl.load(pointer, mask=real, other=0).to(tl.int32)


@triton.jit
def _signed(pointer, real):
    return tl.load(pointer, mask=real, other=0).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _half(halves, at, real):
    """The fp16 number at the even byte `at`."""
    return tl.load(halves + at // 2, mask=real, other=0.0).to(tl.float32)
