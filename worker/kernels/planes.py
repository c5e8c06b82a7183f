"""Quantised weights in the order that the Triton kernels read.

GGUF's blocks are 18 to 210 bytes long, so that wide loads are not aligned in them, and a thread
would decode the scales of each block by itself. `Planes` has the same bits, apart: the low four
bits of all values, their high bits, and the scales. Fields of a block are named as in ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STEP = 256  # values of a row that lie together
PARTS = 8  # of a step, of 32 values
WORDS = 4  # of 32 bits, of the scales of a step
TILE = 64  # rows that a program multiplies
PACKED_VALUES = 1 << 24  # of a matrix that are packed at a time
MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the values of e2m1
HIGH = {5: torch.uint8, 6: torch.int16}  # the type of `Planes.high`, by the bits


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

    @property
    def numbers(self) -> int:
        """Numbers per block that multiply its scales and minima."""
        return self.supers * (1 + self.minima)


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
    arrived: Tensor  # int32, zeros: programs that have left a sum, by tile of rows

    @property
    def steps(self) -> int:
        return -(-self.columns // STEP)

    def fill(self, first: int, blocks: Tensor) -> None:
        """Store rows from `first` on: uint8 [rows, bytes per row], on the device."""
        step = max(1, PACKED_VALUES // self.columns)
        for start in range(0, len(blocks), step):
            some = blocks[start : start + step].contiguous()
            rows = slice(first + start, first + start + len(some))
            low, high, scales, supers = _planes(self.format, some, self.columns)
            self.low[rows], self.scales[:, rows] = low, scales
            if high is not None:
                self.high[rows] = high
            if supers is not None:
                self.supers[:, rows] = supers


def empty(name: str, rows: int, columns: int, device: torch.device) -> Planes:
    """A matrix of the type `name`, without values."""
    form, steps = FORMATS[name], -(-columns // STEP)

    def plane(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    part, width = STEP // PARTS, form.numbers
    low = (torch.int8, STEP) if form.bits == 8 else (torch.int32, part)
    return Planes(
        form,
        rows,
        columns,
        low=plane(low[0], rows, steps, low[1]),
        high=plane(HIGH.get(form.bits, torch.uint8), rows, steps, part * (form.bits in HIGH)),
        scales=plane(torch.int32, steps, rows, WORDS),
        supers=plane(torch.float16, steps, rows, width),
        arrived=torch.zeros(-(-rows // TILE), dtype=torch.int32, device=device),
    )


def pack(name: str, blocks: Tensor) -> Planes:
    """blocks uint8 [rows, bytes per row] of the type `name`, on any device."""
    form, rows = FORMATS[name], len(blocks)
    planes = empty(name, rows, blocks.shape[1] // form.size * form.values, blocks.device)
    planes.fill(0, blocks)
    return planes


def bytes_of(name: str, rows: int, columns: int) -> int:
    """Memory of the planes of a matrix, but for the counters."""
    form, steps = FORMATS[name], -(-columns // STEP)
    return rows * steps * (form.bits * STEP // 8 + 4 * WORDS + 2 * form.numbers)


def _planes(
    form: Format, blocks: Tensor, columns: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """`low`, `high`, `scales` and `supers` of some rows, as far as the format has them."""
    rows, per_row = len(blocks), columns // form.values
    q, scales, supers = form.decode(blocks.view(-1, form.size))
    q = _filled(q.reshape(rows, columns), STEP).view(rows, -1, PARTS, STEP // PARTS)
    scales = _filled(scales.reshape(rows, -1), STEP // form.part * (2 if form.minima else 1))
    steps = q.shape[1]
    words = scales.reshape(rows, steps, -1).view(torch.int32).transpose(0, 1)
    if supers is not None:
        supers = supers.reshape(rows, per_row, -1).transpose(0, 1)
    if form.bits == 8:
        return q.reshape(rows, steps, STEP).view(torch.int8), None, words, supers
    low, high = q & 15, q >> 4
    packed = [low[:, :, 2 * at] | low[:, :, 2 * at + 1] << 4 for at in range(4)]
    wide = torch.stack(packed, dim=-1).view(torch.int32).squeeze(-1)
    return wide, _high(form.bits, high) if form.bits in HIGH else None, words, supers


def _high(bits: int, high: Tensor) -> Tensor:
    """[rows, steps, 8, 32] → [rows, steps, 32], the bits of the parts in ascending places."""
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


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor, None]:
    """Twice the values, and half the scales, which are exact in fp16 from 2^-24 to 2^15."""
    doubled = [16 + sign * value for sign in (1, -1) for value in MXFP4]
    q = torch.tensor(doubled, dtype=torch.uint8, device=blocks.device)
    exponents = (blocks[:, :1].int() - 1).clamp(min=0)  # of 2^(e - 128)
    return q[_nibbles(blocks[:, 1:]).int()], (exponents << 23).view(torch.float32).half(), None


FORMATS = {
    "Q4_0": Format(4, 32, 18, _q4_0, offset=8),
    "Q5_0": Format(5, 32, 22, _q5_0, offset=16),
    "Q8_0": Format(8, 32, 34, _q8_0),
    "Q4_K": Format(4, 256, 144, _q4_k, supers=True, minima=True),
    "Q5_K": Format(5, 256, 176, _q5_k, supers=True, minima=True),
    "MXFP4": Format(5, 32, 17, _mxfp4, offset=16),
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
