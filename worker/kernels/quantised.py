"""Products with quantised weights: `src/quantised.cpp`."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels import library, weight_memory
from worker.kernels.library import TYPE_CODES

PANEL = 16  # output rows that are packed together
BLOCK = 32  # channels with one activation scale
WIDE_FROM = 64  # rows, as in src/quantised_bf16.h
SCRATCH = 48  # bytes per row and block for rounded activations
# GGUF's names of the formats → their codes in src/quantised.h, and the channels of a block.
FORMATS = {"Q4_0": (0, 32), "Q8_0": (1, 32), "Q4_K": (2, 256), "Q5_K": (3, 256), "Q6_K": (4, 256)}


@dataclass(frozen=True)
class PackedBlocks:
    """A matrix [rows, columns] in the layout of the kernels."""

    code: int  # of the format, in FORMATS
    rows: int
    columns: int
    data: Tensor  # uint8


def serves(format_name: str, rows: int, columns: int) -> bool:
    """Whether the kernels multiply with a matrix of this format and shape."""
    return (
        format_name in FORMATS
        and rows % PANEL == 0
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


class Merged:
    """Packed matrices one below the other, as `linear` reads them."""

    def __init__(self, parts: Sequence[PackedBlocks]) -> None:
        self._parts = parts  # keeps their memory
        self.count, self.outputs = len(parts), sum(part.rows for part in parts)
        facts = [fact for part in parts for fact in (part.code, part.data.data_ptr(), part.rows)]
        self.table = (c_int64 * len(facts))(*facts)


def linear(x: Tensor, weight: Merged) -> Tensor:
    """x Wᵀ: x [rows, columns] in float32 or bf16 → [rows, outputs] in its dtype.

    The activations are rounded to int8, with one scale per row and 32 columns; but with AMX, from
    WIDE_FROM rows of bf16 on, the weights are dequantised to bf16 instead.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    scratch = torch.empty(rows * columns // BLOCK * SCRATCH, dtype=torch.uint8)
    y = torch.empty(rows, weight.outputs, dtype=x.dtype)
    library.require().quantised_linear(
        x.data_ptr(),
        x.stride(0),
        rows,
        columns,
        TYPE_CODES[x.dtype],
        weight.table,
        weight.count,
        y.data_ptr(),
        weight.outputs,
        scratch.data_ptr(),
        torch.get_num_threads(),
    )
    return y
