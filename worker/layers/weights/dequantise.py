"""GGUF's quantised blocks → float32 values, with torch operations on any device.

Each function takes the bytes of n blocks, uint8 [n, bytes per block], and returns float32
[n, values per block], bit for bit as gguf.quants computes them. Fields of a block are named as in
ggml: d and dmin scale the block, m and the 6-bit sub-scales its parts. Types without a function
here are dequantised by gguf.quants on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import quants
from torch import Tensor

from worker.layers.transfer import to_device

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled e2m1


def dequantise(blocks: Tensor, kind: Type) -> Tensor:
    """uint8 [n, bytes per block] → float32 [n, values per block]."""
    function = FUNCTIONS.get(kind)
    if function is not None:
        return function(blocks)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite or NaN
        values = quants.dequantize(blocks.cpu().numpy(), kind)
    return torch.from_numpy(values).to(blocks.device)


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    q = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    return _half(blocks, 0) * q.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _signed(blocks[:, 2:]) * _half(blocks, 0)


def _q2_k(blocks: Tensor) -> Tensor:
    sub = blocks[:, :16]
    scales = _half(blocks, 80) * (sub & 15).float()
    minima = _half(blocks, 82) * (sub >> 4).float()
    q = _pairs(blocks[:, 16:80]).view(-1, 16, 16).float()
    return (scales[..., None] * q - minima[..., None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    sub = _nibbles(low) | (_fields(high, 2) & 3).flatten(1) << 4
    scales = _half(blocks, 108) * (sub.float() - 32)
    high_bits = (_fields(blocks[:, :32], 1) & 1).flatten(1)
    q = _pairs(blocks[:, 32:96]).float() - ((high_bits ^ 1) << 2).float()
    return (scales[..., None] * q.view(-1, 16, 16)).flatten(1)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scaled(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return _scaled(blocks, low | (_fields(blocks[:, 16:48], 1) & 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    scales = _half(blocks, 208) * _signed(blocks[:, 192:208])
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    q = (low | _pairs(blocks[:, 128:192]) << 4).float() - 32
    return (scales[..., None] * q.view(-1, 16, 16)).flatten(1)


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _look_up(_nibbles(blocks[:, 2:]), IQ4_VALUES)


def _iq4_xs(blocks: Tensor) -> Tensor:
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    high = (blocks[:, 2:4, None] >> _shifts(blocks, 2) & 3).flatten(1)
    scales = _half(blocks, 0) * ((low | high << 4).float() - 32)
    q = _nibbles(blocks[:, 8:].unflatten(1, (8, 16)))
    return (scales[..., None] * _look_up(q, IQ4_VALUES)).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent = blocks[:, :1].int()
    # Half of 2^(e - 127), as its bits: below 2 it is a denormal.
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    scale: Tensor = bits.view(torch.float32)
    return scale * _look_up(_nibbles(blocks[:, 1:]), MXFP4_VALUES)


FUNCTIONS: dict[Type, Callable[[Tensor], Tensor]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q2_K: _q2_k,
    Type.Q3_K: _q3_k,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The fp16 number at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].clone().view(torch.float16).float()


def _signed(values: Tensor) -> Tensor:
    return values.view(torch.int8).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., k] bytes → [..., 2k]: their low nibbles, then their high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _shifts(like: Tensor, width: int) -> Tensor:
    """0, width, 2 · width, … within a byte."""
    return torch.arange(0, 8, width, dtype=torch.uint8, device=like.device)


def _fields(packed: Tensor, width: int) -> Tensor:
    """[n, k] bytes → [n, 8 / width, k]: each field of `width` bits shifted to the right end, with
    the fields above it still in place."""
    return packed[:, None, :] >> _shifts(packed, width)[:, None]


def _pairs(packed: Tensor) -> Tensor:
    """64 bytes → 256 fields of 2 bits: of each 32 bytes, first all lowest fields."""
    halves: Tensor = packed.unflatten(1, (2, 1, 32)) >> _shifts(packed, 2)[:, None]
    return (halves & 3).flatten(1)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """32 numbers: 4 bytes with the fifth bit of each, 16 bytes with their low nibbles."""
    bits = (high[..., None] >> _shifts(high, 1) & 1).flatten(1)
    return _nibbles(low) | bits << 4


def _scaled(blocks: Tensor, q: Tensor) -> Tensor:
    """Q4_K and Q5_K: 8 parts of 32 values, each with a 6-bit scale and minimum in 12 bytes."""
    first, second, last = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    sub = torch.cat((first & 63, last & 15 | first >> 2 & 48), dim=1)
    low = torch.cat((second & 63, last >> 4 | second >> 2 & 48), dim=1)
    scales = _half(blocks, 0) * sub.float()
    minima = _half(blocks, 2) * low.float()
    return (scales[..., None] * q.view(-1, 8, 32).float() - minima[..., None]).flatten(1)


def _look_up(index: Tensor, values: tuple[int, ...]) -> Tensor:
    table = to_device(values, index.device, torch.float32)
    return table[index.int()]
