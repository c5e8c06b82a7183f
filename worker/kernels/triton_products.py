"""Products with quantised weights on GPUs, in Triton: those of few rows in bf16 or fp16 unpack
`Planes` inside the product, so that only they are read; others multiply with `dequantise`'s output.

Importing this needs the package `triton`, which torch's CUDA builds for Linux bring along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.planes import FORMATS, STEP, TILE, Planes, empty, pack
from worker.kernels.triton_launch import kernel, kernel_for_any

__all__ = [
    "FORMATS",
    "dequantise",
    "empty",
    "grouped_product",
    "multiplies",
    "multiplies_grouped",
    "pack",
    "product",
]

# Of x in `product`. With more, what a program reads ahead is more than the shared memory of some
# cards. Tensor cores don't multiply float32, and products of it would take a minute to compile.
MAX_ROWS = 32
LEAST_ROWS = 8  # that a tensor core multiplies
PROGRAMS = 512  # of a product, if the columns suffice
# A small integer q, or'ed to the bits of these numbers, gives 128 + q in bf16 and 1024 + q in fp16.
MAGIC = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}


def multiplies(x: Tensor) -> bool:
    """True if `product` multiplies these rows."""
    return len(x) <= MAX_ROWS and x.dtype in MAGIC


def product(x: Tensor, planes: Planes, y: Tensor) -> None:
    """y = x Wᵀ, with float32 sums. x [rows, columns], as `multiplies` has checked; y [rows,
    outputs] in x's dtype, whose rows may be part of longer ones.

    Products with the same planes run one after another, on one stream: they count in
    `planes.arrived`. A row has the same bits in all products whose number of rows rounds up to the
    same power of two, of at least LEAST_ROWS."""
    form, (rows, columns), outputs = planes.format, x.shape, planes.rows
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles, steps = triton.cdiv(outputs, TILE), planes.steps
    # Neither depends on the number of rows, so that a row does not depend on its neighbours.
    each = triton.cdiv(steps, max(1, min(PROGRAMS // tiles, steps)))
    splits = triton.cdiv(steps, each)
    partial = y
    if splits > 1:
        partial = torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _product(
            (tiles, splits),
            x,
            planes.low,
            planes.high,
            planes.scales,
            planes.scales.view(torch.float16),
            planes.supers,
            partial,
            y,
            planes.arrived,
            rows,
            outputs,
            columns,
            steps,
            x.stride(0),
            y.stride(0),
            each,
            magic=MAGIC[x.dtype],
            bits=form.bits,
            part=form.part,
            offset=form.offset,
            minima=form.minima,
            supers_=form.supers,
            even=columns % STEP == 0,
            split=splits > 1,
            most_rows=max(LEAST_ROWS, triton.next_power_of_2(rows)),
            tile=TILE,
        )


def multiplies_grouped(x: Tensor, matrices: int) -> bool:
    """True if `grouped_product` multiplies these rows. With more, most matrices would be read for
    several chunks of rows."""
    return 2 * len(x) <= MAX_ROWS * matrices and x.dtype in MAGIC


def grouped_product(x: Tensor, counts: Tensor, planes: Planes, y: Tensor) -> None:
    """As `product`, of each row with its own matrix. The rows of `planes` are those of several
    matrices in turn. x [rows, columns], the rows of each matrix together, in their order, as
    `multiplies_grouped` has checked; counts [matrices], the rows of each; y [rows, outputs].

    No number is read back: the grid has as many chunks of rows as there are at most, and a program
    finds its matrix by the counts. A row has the same bits in all products with equal
    `_chunk`s."""
    form, (rows, columns), matrices = planes.format, x.shape, len(counts)
    x = x if x.stride(1) == 1 else x.contiguous()
    outputs, most_rows = planes.rows // matrices, _chunk(rows, matrices)
    # Each matrix with rows has one chunk at least, which may have a single row.
    chunks = (rows + min(rows, matrices) * (most_rows - 1)) // most_rows
    with torch.cuda.device_of(x):
        _grouped_product(
            (triton.cdiv(outputs, TILE), chunks),
            x,
            counts,
            planes.low,
            planes.high,
            planes.scales,
            planes.scales.view(torch.float16),
            planes.supers,
            y,
            matrices,
            outputs,
            columns,
            planes.steps,
            x.stride(0),
            y.stride(0),
            magic=MAGIC[x.dtype],
            bits=form.bits,
            part=form.part,
            offset=form.offset,
            minima=form.minima,
            supers_=form.supers,
            even=columns % STEP == 0,
            width=triton.next_power_of_2(matrices),
            most_rows=most_rows,
            tile=TILE,
        )


def _chunk(rows: int, matrices: int) -> int:
    """Rows that a program multiplies: twice the mean of a matrix, so that few have two chunks."""
    mean = triton.cdiv(2 * rows, matrices)
    return int(min(MAX_ROWS, max(LEAST_ROWS, triton.next_power_of_2(mean))))


def dequantise(
    planes: Planes, first: int, last: int, dtype: torch.dtype, matrices: int = 1
) -> Tensor:
    """Rows first to last [rows, columns], computed in float32 and rounded to `dtype`; those of each
    of several matrices, if the rows of `planes` are theirs in turn."""
    form, piece = planes.format, last - first
    rows = matrices * piece
    output = torch.empty(rows, planes.columns, dtype=dtype, device=planes.low.device)
    with torch.cuda.device_of(output):
        _dequantise(
            (triton.cdiv(rows, 16), planes.steps),
            planes.low,
            planes.high,
            planes.scales,
            planes.scales.view(torch.float16),
            planes.supers,
            output,
            first,
            rows,
            piece,
            planes.rows // matrices,
            planes.rows,
            planes.columns,
            planes.steps,
            bits=form.bits,
            part=form.part,
            offset=form.offset,
            minima=form.minima,
            supers_=form.supers,
            tile=16,
        )
    return output


@kernel_for_any("rows", "columns", "steps", "y_stride", "each")
def _product(
    x,
    low,
    high,
    scales,
    halves,
    supers,
    partial,
    y,
    arrived,
    rows,
    outputs,
    columns,
    steps,
    x_stride,
    y_stride,
    each,
    magic: tl.constexpr,
    bits: tl.constexpr,
    part: tl.constexpr,
    offset: tl.constexpr,
    minima: tl.constexpr,
    supers_: tl.constexpr,
    even: tl.constexpr,
    split: tl.constexpr,
    most_rows: tl.constexpr,
    tile: tl.constexpr,
):
    n = tl.program_id(0) * tile + tl.arange(0, tile)
    m = tl.arange(0, most_rows)
    begin = tl.program_id(1) * each
    total = _sums(
        x,
        m * x_stride,
        m < rows,
        low,
        high,
        scales,
        halves,
        supers,
        n,
        n < outputs,
        outputs,
        columns,
        steps,
        begin,
        tl.minimum(begin + each, steps),
        magic,
        bits,
        part,
        offset,
        minima,
        supers_,
        even,
        most_rows,
        tile,
    )
    n = n[:, None]
    m = m[None, :]
    inside = (m < rows) & (n < outputs)
    to = y + m * y_stride + n
    if split:
        own = partial + (tl.program_id(1) * rows + m) * outputs + n
        tl.store(own, total, mask=inside)
        tl.debug_barrier()
        tile_number = tl.program_id(0)
        before = tl.atomic_add(arrived + tile_number, 1, sem="acq_rel")
        if before == tl.num_programs(1) - 1:
            total = tl.zeros((tile, most_rows), tl.float32)
            for number in range(tl.num_programs(1)):
                others = partial + (number * rows + m) * outputs + n
                total += tl.load(others, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(to, total.to(y.dtype.element_ty), mask=inside)
            tl.store(arrived + tile_number, 0)
    else:
        tl.store(to, total.to(y.dtype.element_ty), mask=inside)


@kernel_for_any("outputs", "columns", "steps", "y_stride")
def _grouped_product(
    x,
    counts,
    low,
    high,
    scales,
    halves,
    supers,
    y,
    matrices,
    outputs,
    columns,
    steps,
    x_stride,
    y_stride,
    magic: tl.constexpr,
    bits: tl.constexpr,
    part: tl.constexpr,
    offset: tl.constexpr,
    minima: tl.constexpr,
    supers_: tl.constexpr,
    even: tl.constexpr,
    width: tl.constexpr,
    most_rows: tl.constexpr,
    tile: tl.constexpr,
):
    each = tl.arange(0, width)
    own = tl.load(counts + each, mask=each < matrices, other=0).to(tl.int32)
    chunks = (own + (most_rows - 1)) // most_rows
    chunk = tl.program_id(1)
    matrix = tl.sum((tl.cumsum(chunks, 0) <= chunk).to(tl.int32), 0)
    if matrix < matrices:  # else there are fewer chunks
        before = each < matrix
        within = (chunk - tl.sum(tl.where(before, chunks, 0), 0)) * most_rows
        first = tl.sum(tl.where(before, own, 0), 0) + within
        rows = tl.sum(tl.where(each == matrix, own, 0), 0) - within
        m = tl.arange(0, most_rows)
        n = tl.program_id(0) * tile + tl.arange(0, tile)
        total = _sums(
            x,
            (first + m) * x_stride,
            m < rows,
            low,
            high,
            scales,
            halves,
            supers,
            matrix * outputs + n,
            n < outputs,
            matrices * outputs,
            columns,
            steps,
            0,
            steps,
            magic,
            bits,
            part,
            offset,
            minima,
            supers_,
            even,
            most_rows,
            tile,
        )
        inside = (m < rows)[None, :] & (n < outputs)[:, None]
        to = y + (first + m)[None, :] * y_stride + n[:, None]
        tl.store(to, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sums(
    x,
    at_rows,
    real_rows,
    low,
    high,
    scales,
    halves,
    supers,
    n,
    real,
    outputs,
    columns,
    steps,
    begin,
    end,
    magic: tl.constexpr,
    bits: tl.constexpr,
    part: tl.constexpr,
    offset: tl.constexpr,
    minima: tl.constexpr,
    supers_: tl.constexpr,
    even: tl.constexpr,
    most_rows: tl.constexpr,
    tile: tl.constexpr,
):
    """The products of rows n of the planes, which have `outputs` rows, with rows of x that begin at
    `at_rows`, added over the steps from begin to end: [tile, most_rows]."""
    dtype: tl.constexpr = x.dtype.element_ty
    bias: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    i = tl.arange(0, part)
    inputs = x + at_rows[None, :] + i[:, None]
    real_rows = real_rows[None, :]
    ones = tl.full((tile, part), 1.0, dtype)
    total = tl.zeros((tile, most_rows), tl.float32)
    for step in range(begin, end):
        scaled = tl.zeros((tile, most_rows), tl.float32)
        least = tl.zeros((tile, most_rows), tl.float32)
        at = step * outputs + n
        for h in tl.static_range(32 // part):
            if bits < 8:
                words = (n[:, None].to(tl.int64) * steps + step) * 32 + h * part + i[None, :]
                w = tl.load(low + words, mask=real[:, None], other=0)
                g = w
                if bits > 4:
                    g = _spread(tl.load(high + words, mask=real[:, None], other=0), bits)
            for j in tl.static_range(4):
                if bits < 8:
                    v = _pair(w, g, j, bits) | magic
                for half in tl.static_range(2):
                    p = 4 * half + j
                    k = step * 256 + p * 32 + h * part
                    if even:
                        xs = tl.load(inputs + k, mask=real_rows, other=0.0)
                    else:
                        xs = tl.load(
                            inputs + k, mask=real_rows & (i[:, None] < columns - k), other=0.0
                        )
                    if bits == 8:
                        at_byte = n[:, None].to(tl.int64) * (steps * 256) + k + i[None, :]
                        q = tl.load(low + at_byte, mask=real[:, None], other=0).to(dtype)
                        found = tl.dot(q, xs)
                    else:
                        q = (v >> (16 * half)).to(tl.int16).to(dtype, bitcast=True)
                        if minima:
                            sums = tl.dot(ones, xs)
                            found = tl.dot(q, xs) - sums * bias
                        else:
                            found = tl.dot((q - (bias + offset)).to(dtype), xs)
                    if supers_:
                        word = tl.load(scales + at * 4 + 2 * h + half, mask=real, other=0)
                        scale = (word << (24 - 8 * j) >> 24).to(tl.float32)
                        if minima:
                            word = tl.load(scales + at * 4 + 2 + half, mask=real, other=0)
                            minimum = (word << (24 - 8 * j) >> 24).to(tl.float32)
                            least += sums * minimum[:, None]
                    else:
                        scale = tl.load(halves + at * 8 + p, mask=real, other=0.0).to(tl.float32)
                    scaled += found * scale[:, None]
        if minima:
            d = tl.load(supers + at * 2, mask=real, other=0.0).to(tl.float32)
            dmin = tl.load(supers + at * 2 + 1, mask=real, other=0.0).to(tl.float32)
            total += scaled * d[:, None] - least * dmin[:, None]
        elif supers_:
            d = tl.load(supers + at, mask=real, other=0.0).to(tl.float32)
            total += scaled * d[:, None]
        else:
            total += scaled
    return total


@triton.jit
def _spread(g, bits: tl.constexpr):
    """The high bits of the parts 0 to 3 in the lower half of a word, the others in the upper."""
    g = g.to(tl.int32)
    if bits == 5:
        return g & 0xF | (g & 0xF0) << 12
    return g & 0xFF | (g & 0xFF00) << 8


@triton.jit
def _pair(w, g, j: tl.constexpr, bits: tl.constexpr):
    """The values of the parts j and j + 4, each in a half of the word."""
    v = w >> (4 * j) & 0x000F000F
    if bits == 5:
        v |= (g >> j & 0x00010001) << 4
    if bits == 6:
        v |= (g >> (2 * j) & 0x00030003) << 4
    return v


@kernel
def _dequantise(
    low,
    high,
    scales,
    halves,
    supers,
    output,
    first,
    rows,
    piece,
    apart,
    outputs,
    columns,
    steps,
    bits: tl.constexpr,
    part: tl.constexpr,
    offset: tl.constexpr,
    minima: tl.constexpr,
    supers_: tl.constexpr,
    tile: tl.constexpr,
):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    step = tl.program_id(1)
    i = tl.arange(0, 32)
    real = row < rows
    n = first + row // piece * apart + row % piece
    at = step * outputs + n
    words = (n[:, None].to(tl.int64) * steps + step) * 32 + i[None, :]
    to = output + row[:, None].to(tl.int64) * columns + step * 256 + i[None, :]
    if bits < 8:
        w = tl.load(low + words, mask=real[:, None], other=0)
        g = w
        if bits > 4:
            g = _spread(tl.load(high + words, mask=real[:, None], other=0), bits)
    for p in tl.static_range(8):
        if bits == 8:
            at_byte = (n[:, None].to(tl.int64) * steps + step) * 256 + p * 32 + i[None, :]
            q = tl.load(low + at_byte, mask=real[:, None], other=0).to(tl.float32)
        else:
            q = (_pair(w, g, p % 4, bits) >> (16 * (p // 4)) & 255).to(tl.float32) - offset
        if supers_:
            word = tl.load(scales + at * 4 + p // 4, mask=real, other=0)
            scale = (word << (24 - 8 * (p % 4)) >> 24).to(tl.float32)[:, None]
            if part == 16:
                word = tl.load(scales + at * 4 + 2 + p // 4, mask=real, other=0)
                last = (word << (24 - 8 * (p % 4)) >> 24).to(tl.float32)[:, None]
                scale = tl.where((i < 16)[None, :], scale, last)
            if minima:
                d = tl.load(supers + at * 2, mask=real, other=0.0).to(tl.float32)
                dmin = tl.load(supers + at * 2 + 1, mask=real, other=0.0).to(tl.float32)
                word = tl.load(scales + at * 4 + 2 + p // 4, mask=real, other=0)
                minimum = (word << (24 - 8 * (p % 4)) >> 24).to(tl.float32)
                value = d[:, None] * scale * q - (dmin * minimum)[:, None]
            else:
                d = tl.load(supers + at, mask=real, other=0.0).to(tl.float32)
                value = d[:, None] * scale * q
        else:
            scale = tl.load(halves + at * 8 + p, mask=real, other=0.0).to(tl.float32)
            value = scale[:, None] * q
        inside = real[:, None] & (step * 256 + p * 32 + i < columns)[None, :]
        tl.store(to + p * 32, value.to(output.dtype.element_ty), mask=inside)
