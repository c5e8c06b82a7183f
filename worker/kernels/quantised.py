"""Quantised weights: products (`src/quantised.cpp`), rows of tables (`src/quantised_rows.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from worker.kernels import choices, library, weight_memory
from worker.kernels.choices import Measurement
from worker.kernels.formats import FORMATS
from worker.kernels.library import TYPE_CODES

SCALE_CHANNELS = 32  # channels with one activation scale
LEAST_WIDE_ROWS = 32  # that the matrix unit multiplies in bf16, see src/quantised_bf16.h
MEASURED_ROWS = (32, 48, 64, 96, 128, 192, 256)
UNLIMITED = 1 << 30  # rows
SCRATCH = 48  # bytes per row and block for rounded activations


@dataclass(frozen=True)
class PackedBlocks:
    """A matrix [rows, columns] in the layout of the kernels."""

    code: int  # of the format, in FORMATS
    rows: int
    columns: int
    data: Tensor  # uint8


def serves(format_name: str, columns: int) -> bool:
    """True if the kernels multiply with matrices of this format and width. They are compiled if
    they are not there yet."""
    return (
        format_name in FORMATS
        and columns % FORMATS[format_name][1] == 0
        and (kernels := library.active()) is not None
        and kernels.uses(format_name)
    )


def pack(format_name: str, rows: int, columns: int, blocks: Tensor) -> PackedBlocks:
    """The file's blocks, uint8 [rows, bytes per row], in the layout of the kernels. Raises
    CannotBuild."""
    code, _ = FORMATS[format_name]
    kernels = library.require()
    kernels.use(format_name)
    data = weight_memory.empty((kernels.packed_bytes(code, rows, columns),), torch.uint8)
    blocks = blocks.contiguous()
    kernels.pack_rows(
        code, blocks.data_ptr(), data.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return PackedBlocks(code, rows, columns, data)


def fastest_wide_rows() -> int:
    """Rows of bf16 from which this machine's matrix unit is faster in bf16, by measurement."""
    kernels = library.require()
    if kernels.level.name != "amx":
        return UNLIMITED
    kept = choices.of(kernels.level.name, torch.get_num_threads())
    return max(LEAST_WIDE_ROWS, kept.get("rows that are rounded to int8", _most_rounded) + 1)


def _most_rounded() -> Measurement:
    values = torch.ones(choices.SIDE, choices.SIDE // 32, 34, dtype=torch.uint8)  # any valid blocks
    packed = [
        pack("Q8_0", choices.SIDE, choices.SIDE, values.flatten(1)) for _ in choices.weights()
    ]
    functions = [
        [partial(linear, weights=Matrices([[one]], wide)) for one in packed]
        for wide in (UNLIMITED, LEAST_WIDE_ROWS)
    ]
    rounds = choices.seconds(functions, MEASURED_ROWS)
    return Measurement.of(rounds, partial(choices.crossing, MEASURED_ROWS))


class Matrices:
    """Matrices of one shape, as `linear` reads them: each consists of packed parts, one below the
    other. All have as many parts. `wide_from`: rows of bf16 from which a matrix unit multiplies in
    bf16, by default as many as this machine's is faster with."""

    def __init__(
        self, matrices: Sequence[Sequence[PackedBlocks]], wide_from: int | None = None
    ) -> None:
        self.parts = matrices  # keeps their memory
        self.wide_from = fastest_wide_rows() if wide_from is None else wide_from
        self.count, self.outputs = len(matrices), sum(part.rows for part in matrices[0])
        facts = [
            fact
            for parts in matrices
            for part in parts
            for fact in (part.code, part.data.data_ptr(), part.rows)
        ]
        self.table = (c_int64 * len(facts))(*facts)


def linear(x: Tensor, weights: Matrices, counts: Tensor | None = None) -> Tensor:
    """x Wᵀ: x [rows, columns] in float32 or bf16 → [rows, outputs] in its dtype. `counts`, int64 on
    the CPU: how many rows belong to each matrix, in order; None: all belong to the only one.

    The activations are rounded to int8, with one scale per row and 32 columns; but with AMX, from
    `wide_from` rows of bf16 on, the weights are dequantised to bf16 instead.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    scratch = torch.empty(rows * columns // SCALE_CHANNELS * SCRATCH, dtype=torch.uint8)
    y = torch.empty(rows, weights.outputs, dtype=x.dtype)
    library.require().quantised_linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        columns,
        TYPE_CODES[x.dtype],
        weights.table,
        len(weights.parts[0]),
        None if counts is None else counts.data_ptr(),
        weights.count,
        y.data_ptr(),
        weights.outputs,
        scratch.data_ptr(),
        weights.wide_from,
        torch.get_num_threads(),
    )
    return y


def rows(
    format_name: str, columns: int, blocks: Tensor, numbers: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows of a table of `columns`, in the file's blocks [n, bytes per row], that have these
    numbers: int64 and in range → [len(numbers), columns] in float32 or bf16, rounded once. `serves`
    has been checked."""
    assert blocks.is_contiguous() and numbers.is_contiguous()
    out = torch.empty(len(numbers), columns, dtype=dtype)
    library.require().unpack_rows(
        FORMATS[format_name][0],
        blocks.data_ptr(),
        numbers.data_ptr(),
        out.data_ptr(),
        len(numbers),
        columns,
        TYPE_CODES[dtype],
        torch.get_num_threads(),
    )
    return out
