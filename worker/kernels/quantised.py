"""Quantised weights: products (`src/quantised.cpp`), rows of tables (`src/quantised_rows.cpp`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels import library, weight_memory
from worker.kernels.library import TYPE_CODES

SCALE_CHANNELS = 32  # channels with one activation scale
WIDE_FROM = 64  # rows, as in src/quantised_bf16.h
SCRATCH = 48  # bytes per row and block for rounded activations
# GGUF's names of the formats → their codes in src/quantised.h, and the channels of a block.
FORMATS = {
    "Q4_0": (0, 32),
    "Q8_0": (1, 32),
    "Q4_K": (2, 256),
    "Q5_K": (3, 256),
    "Q6_K": (4, 256),
    "MXFP4": (5, 32),
    "Q4_1": (6, 32),
    "Q5_0": (7, 32),
    "Q5_1": (8, 32),
    "Q2_K": (9, 256),
    "Q3_K": (10, 256),
    "IQ4_NL": (11, 32),
    "IQ4_XS": (12, 256),
}


@dataclass(frozen=True)
class PackedBlocks:
    """A matrix [rows, columns] in the layout of the kernels."""

    code: int  # of the format, in FORMATS
    rows: int
    columns: int
    data: Tensor  # uint8


def serves(format_name: str, columns: int) -> bool:
    """True if the kernels multiply with matrices of this format and width."""
    return (
        format_name in FORMATS
        and columns % FORMATS[format_name][1] == 0
        and library.active() is not None
    )


def pack(format_name: str, rows: int, columns: int, blocks: Tensor) -> PackedBlocks:
    """The file's blocks, uint8 [rows, bytes per row], in the layout of the kernels."""
    code, _ = FORMATS[format_name]
    kernels = library.require()
    data = weight_memory.empty((kernels.packed_bytes(code, rows, columns),), torch.uint8)
    blocks = blocks.contiguous()
    kernels.pack_rows(
        code, blocks.data_ptr(), data.data_ptr(), rows, columns, torch.get_num_threads()
    )
    return PackedBlocks(code, rows, columns, data)


class Matrices:
    """Matrices of one shape, as `linear` reads them: each consists of packed parts, one below the
    other. All have as many parts."""

    def __init__(self, matrices: Sequence[Sequence[PackedBlocks]]) -> None:
        self.parts = matrices  # keeps their memory
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
    WIDE_FROM rows of bf16 on, the weights are dequantised to bf16 instead.
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
        torch.get_num_threads(),
    )
    return y


def rows(
    format_name: str, columns: int, blocks: Tensor, numbers: Tensor, dtype: torch.dtype
) -> Tensor:
    """The rows of a table of `columns`, in the file's blocks [n, bytes per row], that have these
    numbers: int64 and in range → [len(numbers), columns] in float32 or bf16, rounded once."""
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
