"""Quantised weights in the order that the Triton kernels read.

GGUF's blocks are 18 to 210 bytes long, so that wide loads are not aligned in them, and a thread
would decode the scales of each block by itself. `Planes` has the same bits, apart: the low four
bits of all values, their high bits, and the scales. Fields of a block are named as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 256  # values of a row that lie together
PARTS = 8  # of a step, of 32 values
PACKED_VALUES = 1 << 24  # of a matrix that are packed at a time


@dataclass(frozen=True, slots=True)
class Format:
    """A type of GGUF blocks. A value is scale · (q - offset) - minimum, where q has `bits` bits, or
    is an int8 if they are 8. A scale serves `part` values. With `supers`, scales and minima are
    bytes, which a number per block multiplies; without, they are fp16."""

    bits: int
    values: int  # of a block
    size: int  # bytes of a block
    decode: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]
    offset: int = 0
    part: int = 32
    supers: bool = False
    minima: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Planes:
    """A matrix [rows, columns]; its columns are filled up to whole steps with zeros.

    `low` [rows, steps, 32] int32: bits 4p … 4p + 3 of word i belong to value 32 p + i of the step;
    of 8 bits, [rows, steps, 256] int8, as they are. `high` [rows, steps, 32]: the fifth bits as
    uint8, or the fifth and sixth as int16, in that order. `scales` [steps, rows, words] int32;
    `supers` [steps, rows, 1 or 2] fp16: d and dmin.
    """

    format: Format
    rows: int
    columns: int
    low: Tensor
    high: Tensor
    scales: Tensor
    supers: Tensor
    arrived: Tensor  # int32, zeros: programs that have left a sum, by tile

    @property
    def steps(self) -> int:
        return -(-self.columns // STEP)


def pack(name: str, blocks: Tensor) -> Planes:
    """blocks uint8 [rows, bytes per row] of the type `name`, on any device."""
    form, rows = FORMATS[name], len(blocks)
    columns = blocks.shape[1] // form.size * form.values
    pieces = list(zip(*_pieces(form, blocks, columns), strict=True))
    low, high = (torch.cat(piece) for piece in pieces[:2])
    scales, supers = (torch.cat(piece, dim=1) for piece in pieces[2:])
    arrived = torch.zeros(rows, dtype=torch.int32, device=blocks.device)
    return Planes(form, rows, columns, low, high, scales, supers, arrived)


def _pieces(form: Format, blocks: Tensor, columns: int) -> Iterator[tuple[Tensor, ...]]:
    """`low`, `high`, `scales` and `supers` of some rows at a time."""
    step = max(1, PACKED_VALUES // columns)
    for start in range(0, len(blocks), step):
        yield _planes(form, blocks[start : start + step].contiguous(), columns)


def _planes(form: Format, blocks: Tensor, columns: int) -> tuple[Tensor, ...]:
    rows, per_row = len(blocks), columns // form.values
    q, scales, supers = form.decode(blocks.view(-1, form.size))
    q = _filled(q.reshape(rows, columns), STEP).view(rows, -1, PARTS, STEP // PARTS)
    scales = _filled(scales.reshape(rows, -1), STEP // form.part * (2 if form.minima else 1))
    steps = q.shape[1]
    words = scales.reshape(rows, steps, -1).view(torch.int32).transpose(0, 1).contiguous()
    if supers is None:
        supers = blocks.new_empty(0, rows, 0, dtype=torch.float16)
    else:
        supers = supers.reshape(rows, per_row, -1).transpose(0, 1).contiguous()
    if form.bits == 8:
        return q.reshape(rows, steps, STEP).view(torch.int8), q.new_empty(rows, 0), words, supers
    low, high = q & 15, q >> 4
    packed = [low[:, :, 2 * at] | low[:, :, 2 * at + 1] << 4 for at in range(4)]
    wide = torch.stack(packed, dim=-1).view(torch.int32).squeeze(-1)
    return wide, _high(form.bits, high), words, supers


def _high(bits: int, high: Tensor) -> Tensor:
    """[rows, steps, 8, 32] → [rows, steps, 32], the bits of the parts in ascending places."""
    if bits == 4:
        return high.new_empty(len(high), 0)
    width = bits - 4
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=high.device)[:, None]
    # Each byte has the bits of `8 // width` parts, which don't overlap.
    packed = [
        (high[:, :, at : at + len(shifts)] << shifts).sum(dim=2, dtype=torch.uint8)
        for at in range(0, PARTS, len(shifts))
    ]
    if width == 1:
        return packed[0]
    return torch.stack(packed, dim=-1).view(torch.int16).squeeze(-1)


def _filled(x: Tensor, unit: int) -> Tensor:
    """Columns filled up with zeros to a multiple of `unit`."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % unit)).contiguous()


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, 2:6, None] >> shifts & 1).flatten(1)
    return _nibbles(blocks[:, 6:]) | fifth << 4, _half(blocks, 0), None


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    return blocks[:, 2:], _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = _nibbles(blocks[:, 16:].unflatten(1, (4, 32)))
    return q, _six_bits(blocks), _half(blocks, 0, 2)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = (blocks[:, None, 16:48] >> shifts[:, None] & 1).flatten(1)
    q = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).flatten(1)
    return q | fifth << 4, _six_bits(blocks), _half(blocks, 0, 2)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts[:, None] & 3
    q = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1) | high.flatten(1) << 4
    # Those of the first 16 values of all parts, then of the last.
    scales = blocks[:, 192:208].unflatten(1, (8, 2)).transpose(1, 2)
    return q, scales.flatten(1), _half(blocks, 208)


FORMATS = {
    "Q4_0": Format(4, 32, 18, _q4_0, offset=8),
    "Q5_0": Format(5, 32, 22, _q5_0, offset=16),
    "Q8_0": Format(8, 32, 34, _q8_0),
    "Q4_K": Format(4, 256, 144, _q4_k, supers=True, minima=True),
    "Q5_K": Format(5, 256, 176, _q5_k, supers=True, minima=True),
    "Q6_K": Format(6, 256, 210, _q6_k, offset=32, part=16, supers=True),
}


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] bytes → [..., 2k]: their low nibbles, then their high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _half(blocks: Tensor, *places: int) -> Tensor:
    """The fp16 numbers at these bytes of each block, [n, places]."""
    return torch.cat([blocks[:, at : at + 2] for at in places], dim=1).view(torch.float16)


def _six_bits(blocks: Tensor) -> Tensor:
    """The scales of 8 parts of 32 values, and their minima, of 6 bits each, as bytes [n, 16]."""
    first, second, last = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = first & 63, last & 15 | first >> 2 & 48
    return torch.cat((*scales, second & 63, last >> 4 | second >> 2 & 48), dim=1)
