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

from worker.kernels.triton_launch import kernel

MAX_ROWS = 64  # of x in `product`; beyond it the dequantised weight is multiplied
LEAST_ROWS = 16  # that a tensor core multiplies
TILE = 16  # outputs of one program
STEP = 256  # columns that it dequantises at a time: one block or several
MOST_STEPS = 4  # of a program, where there are fewer than PROGRAMS
PROGRAMS = 1024
ENOUGH = 512  # programs of one warp each that fill a GPU; fewer have four
SUMMED = 1024  # outputs of a program that sums what several have left

Q4_0, Q8_0, Q4_K, Q5_K, Q6_K = (tl.constexpr(code) for code in range(5))


@dataclass(frozen=True, slots=True)
class Format:
    """A type of GGUF blocks: its code here, and the values and bytes of a block. The columns of a
    step are dequantised in two halves, each in `runs` runs of neighbours."""

    code: int
    values: int
    size: int
    runs: int = 4

    @property
    def constants(self) -> dict[str, int]:
        """The arguments of the kernels that say it."""
        given = {"kind": self.code, "values": self.values, "size": self.size}
        return {**given, "runs": self.runs, "tile": TILE, "step": STEP}


FORMATS = {
    "Q4_0": Format(0, 32, 18, runs=8),
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
    tiles, steps = triton.cdiv(outputs, TILE), triton.cdiv(columns, STEP)
    # Neither depends on the number of rows, so that a row does not depend on its neighbours.
    splits = max(1, min(PROGRAMS // tiles, triton.cdiv(steps, MOST_STEPS)))
    most_rows = max(LEAST_ROWS, triton.next_power_of_2(rows))
    warps = most_rows // LEAST_ROWS if tiles * splits >= ENOUGH else 4
    partial = y
    if splits > 1:
        partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _product(
            (tiles, splits),
            x,
            blocks,
            blocks.view(torch.float16),
            partial,
            rows,
            outputs,
            columns,
            x.stride(0),
            y.stride(0) if splits == 1 else outputs,
            triton.cdiv(steps, splits),
            most_rows=most_rows,
            warps=warps,
            **form.constants,
        )
        if splits > 1:
            _sum_splits(
                (rows, triton.cdiv(outputs, SUMMED)),
                partial,
                y,
                rows,
                outputs,
                y.stride(0),
                splits,
                width=SUMMED,
            )


def dequantise(format_name: str, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [rows, bytes per row], contiguous → their values [rows, columns], computed in
    float32 and rounded to `dtype`."""
    form, (rows, row_bytes) = FORMATS[format_name], blocks.shape
    columns = row_bytes // form.size * form.values
    output = torch.empty(rows, columns, dtype=dtype, device=blocks.device)
    with torch.cuda.device_of(blocks):
        _dequantise(
            (triton.cdiv(rows, TILE), triton.cdiv(columns, STEP)),
            blocks,
            blocks.view(torch.float16),
            output,
            rows,
            columns,
            **form.constants,
        )
    return output


@kernel
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
    steps,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    runs: tl.constexpr,
    most_rows: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
):
    m = tl.arange(0, most_rows)[:, None]
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    first, second = _columns(kind, runs, step)
    total = tl.zeros((most_rows, tile), tl.float32)
    begin = tl.program_id(1) * steps
    for number in range(begin, tl.minimum(begin + steps, tl.cdiv(columns, step))):
        a, b = _halves(
            blocks, halves, n, number, outputs, columns, kind, values, size, runs, tile, step
        )
        k = number * step + first[None, :]
        inputs = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < columns), other=0.0)
        total += tl.dot(inputs, tl.trans(a.to(inputs.dtype)), input_precision="ieee")
        k = number * step + second[None, :]
        inputs = tl.load(x + m * x_stride + k, mask=(m < rows) & (k < columns), other=0.0)
        total += tl.dot(inputs, tl.trans(b.to(inputs.dtype)), input_precision="ieee")
    n = n[None, :]
    to = y + (tl.program_id(1) * rows + m) * y_stride + n
    tl.store(to, total.to(y.dtype.element_ty), mask=(m < rows) & (n < outputs))


@kernel
def _sum_splits(partial, y, rows, outputs, y_stride, splits, width: tl.constexpr):
    row = tl.program_id(0)
    n = tl.program_id(1) * width + tl.arange(0, width)
    total = tl.zeros((width,), tl.float32)
    for split in range(splits):
        total += tl.load(partial + (split * rows + row) * outputs + n, mask=n < outputs, other=0.0)
    tl.store(y + row * y_stride + n, total.to(y.dtype.element_ty), mask=n < outputs)


@kernel
def _dequantise(
    blocks,
    halves,
    output,
    rows,
    columns,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    runs: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
):
    n, number = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1)
    first, second = _columns(kind, runs, step)
    a, b = _halves(blocks, halves, n, number, rows, columns, kind, values, size, runs, tile, step)
    n = n[:, None]
    to = output + n.to(tl.int64) * columns
    k = number * step + first[None, :]
    tl.store(to + k, a.to(output.dtype.element_ty), mask=(n < rows) & (k < columns))
    k = number * step + second[None, :]
    tl.store(to + k, b.to(output.dtype.element_ty), mask=(n < rows) & (k < columns))


@triton.jit
def _columns(kind: tl.constexpr, runs: tl.constexpr, step: tl.constexpr):
    """The columns [step / 2] of both halves of a step."""
    i = tl.arange(0, step // 2)
    length: tl.constexpr = step // 2 // runs
    g, r = i // length, i % length
    if kind == Q8_0:
        first = i
        second = i + step // 2
    elif kind == Q4_0:
        first = g * 32 + r
        second = first + 16
    elif kind == Q6_K:
        first = g // 2 * 128 + g % 2 * 32 + r
        second = first + 64
    else:
        first = g * 64 + r
        second = first + 32
    return first, second


@triton.jit
def _halves(
    blocks,
    halves,
    n,
    number,
    rows,
    columns,
    kind: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    runs: tl.constexpr,
    tile: tl.constexpr,
    step: tl.constexpr,
):
    """The float32 values of both halves of a step [tile, step / 2], in the order of `_columns`, in
    rows n [tile]; 0 outside the matrix. Neighbours in a run come from neighbouring bytes, which are
    loaded together, and share their scale."""
    length: tl.constexpr = step // 2 // runs
    n = n[:, None, None]
    g, r = tl.arange(0, runs)[None, :, None], tl.arange(0, length)[None, None, :]
    real = n < rows
    at = n.to(tl.int64) * (columns // values * size)  # a block's first byte
    if kind == Q8_0:
        block = number * (step // values) + g
        at += block * size
        inside = real & (block * values < columns)
        a = _half(halves, at, inside) * _signed(blocks + at + 2 + r, inside)
        at += runs * size
        inside = real & ((block + runs) * values < columns)
        b = _half(halves, at, inside) * _signed(blocks + at + 2 + r, inside)
    elif kind == Q4_0:
        block = number * (step // values) + g
        at += block * size
        inside = real & (block * values < columns)
        q, scale = _byte(blocks + at + 2 + r, inside), _half(halves, at, inside)
        a = scale * ((q & 15) - 8).to(tl.float32)
        b = scale * ((q >> 4) - 8).to(tl.float32)
    elif kind == Q6_K:
        at += number * size
        low = _byte(blocks + at + g * 32 + r, real)
        high = _byte(blocks + at + 128 + g // 2 * 32 + r, real) >> (g % 2 * 2)
        scales = blocks + at + 192 + g // 2 * 8 + g % 2 * 2 + r // 16
        d = _half(halves, at + 208, real)
        a = d * _signed(scales, real) * ((low & 15 | (high & 3) << 4) - 32).to(tl.float32)
        b = d * _signed(scales + 4, real) * ((low >> 4 | (high >> 4 & 3) << 4) - 32).to(tl.float32)
    else:
        at += number * size
        nibbles = 48 if kind == Q5_K else 16
        q = _byte(blocks + at + nibbles + g * 32 + r, real)
        low, high = q & 15, q >> 4
        if kind == Q5_K:
            bits = _byte(blocks + at + 16 + r, real) >> (2 * g)
            low = low | (bits & 1) << 4
            high = high | (bits >> 1 & 1) << 4
        d, dmin = _half(halves, at, real), _half(halves, at + 2, real)
        scale, minimum = _six_bits(blocks, at, 2 * g, real)
        a = d * scale * low.to(tl.float32) - dmin * minimum
        scale, minimum = _six_bits(blocks, at, 2 * g + 1, real)
        b = d * scale * high.to(tl.float32) - dmin * minimum
    return tl.reshape(a, (tile, step // 2)), tl.reshape(b, (tile, step // 2))


@triton.jit
def _six_bits(blocks, at, part, real):
    """The scale and the minimum of a part of 32 values, 6 bits each, as float32."""
    first = _byte(blocks + at + 4 + part % 4, real)
    second = _byte(blocks + at + 8 + part % 4, real)
    last = _byte(blocks + at + 12 + part % 4, real)
    scale = tl.where(part < 4, first & 63, last & 15 | first >> 2 & 48)
    minimum = tl.where(part < 4, second & 63, last >> 4 | second >> 2 & 48)
    return scale.to(tl.float32), minimum.to(tl.float32)


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
