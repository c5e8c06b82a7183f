"""Quantises values to blocks of one type.

The simple types are written as ggml writes them. The K-quants search the scale of each part of a
block by least squares, without an importance matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from worker.layers.weights.quantised_tensor import QuantisedTensor

# Values that are quantised at a time: the temporary tensors stay in the processor's cache.
QUANTISE_VALUES = 1 << 17
TINY = 1e-15  # parts whose values are all smaller are stored as zeros


def quantise(tensor: Tensor, kind: Type) -> QuantisedTensor:
    """`tensor` [..., columns] in blocks of `kind`, which must divide the columns."""
    values, size = GGML_QUANT_SIZES[kind]
    shape = tuple(tensor.shape)
    groups = tensor.reshape(-1, values)
    blocks = torch.empty(len(groups), size, dtype=torch.uint8)
    step = max(1, QUANTISE_VALUES // values)
    for start in range(0, len(groups), step):
        blocks[start : start + step] = FUNCTIONS[kind](groups[start : start + step].float().cpu())
    return QuantisedTensor(kind, shape, blocks.view(*shape[:-1], -1))


def _simple(kind: Type) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.from_numpy(quants.quantize(x.numpy(), kind))


def _q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    # Halves are rounded away from zero.
    q = scaled.trunc() + (scaled.frac() * 2).trunc()
    return torch.cat((_half(scale), _signed(q)), dim=1)


def _q4_k(x: Tensor) -> Tensor:
    scales, q = _affine_block(x, largest=15, first=-1.0, steps=21)
    pairs = q.view(-1, 4, 2, 32)
    return torch.cat((scales, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    scales, q = _affine_block(x, largest=31, first=-0.5, steps=16)
    low = (q & 15).view(-1, 4, 2, 32)
    bits = (q >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]
    high = bits.sum(1, dtype=torch.uint8)
    return torch.cat((scales, high, (low[:, :, 0] | low[:, :, 1] << 4).flatten(1)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    parts = x.view(-1, 16, 16)
    exact = _symmetric_scale(parts, 32)  # [n, 16, 1]
    largest = _most(exact, exact.abs(), dim=1)[:, 0]  # [n, 1], with its sign
    usable = largest.abs() > TINY
    inverse = torch.where(usable, -128 / largest, 0)
    sub = (exact.squeeze(2) * inverse).round().clamp(-128, 127)
    stored = _rounded(_inverse(inverse))
    scales = (stored * sub)[..., None]
    q = ((parts * _inverse(scales)).round().clamp(-32, 31) + 32).to(torch.uint8)
    q = q.view(-1, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = (q >> 4) << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = high.sum(2, dtype=torch.uint8)
    return torch.cat((low.flatten(1), high.flatten(1), _signed(sub), _half(stored)), dim=1)


def _mxfp4(x: Tensor) -> Tensor:
    """4-bit floats with a power of two per block. Keeps values that are such numbers already."""
    largest = x.abs().amax(1, keepdim=True)
    exponent = torch.frexp(largest).exponent - 3 + 127  # that of 4 or 6, the largest numbers
    exponent = torch.where(largest > 0, exponent, 0).clamp(0, 254)
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    number = torch.bucketize(torch.ldexp(x.abs(), 127 - exponent), between)
    number = (number | ((x < 0) & (number > 0)).long() << 3).to(torch.uint8).view(-1, 2, 16)
    return torch.cat((exponent.to(torch.uint8), number[:, 0] | number[:, 1] << 4), dim=1)


FUNCTIONS: dict[Type, Callable[[Tensor], Tensor]] = {
    Type.Q4_0: _simple(Type.Q4_0),
    Type.Q4_1: _simple(Type.Q4_1),
    Type.Q5_0: _simple(Type.Q5_0),
    Type.Q5_1: _simple(Type.Q5_1),
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.MXFP4: _mxfp4,
}


def _affine_block(x: Tensor, *, largest: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """The head of a Q4_K or Q5_K block [n, 16], and its numbers [n, 8, 32] of 0 to `largest`.

    Each part of 32 values has a scale and a minimum; both are rounded to 6 bits of the largest.
    """
    parts = x.view(-1, 8, 32)
    scale, minimum = _affine_fit(parts, largest, first, steps)  # [n, 8]; values = scale · q - min
    most_scale, most_minimum = scale.amax(1, keepdim=True), minimum.amax(1, keepdim=True)
    sub = (scale * _inverse(most_scale) * 63).round().clamp(0, 63)
    low = (minimum * _inverse(most_minimum) * 63).round().clamp(0, 63)
    d, dmin = _rounded(most_scale / 63), _rounded(most_minimum / 63)
    scales, minima = (d * sub)[..., None], (dmin * low)[..., None]
    q = ((parts + minima) * _inverse(scales)).round().clamp(0, largest).to(torch.uint8)
    sub, low = sub.to(torch.uint8), low.to(torch.uint8)
    packed = (
        sub[:, :4] | sub[:, 4:] >> 4 << 6,
        low[:, :4] | low[:, 4:] >> 4 << 6,
        (sub[:, 4:] & 15) | (low[:, 4:] & 15) << 4,
    )
    return torch.cat((_half(d), _half(dmin), *packed), dim=1), q


def _affine_fit(x: Tensor, largest: int, first: float, steps: int) -> tuple[Tensor, Tensor]:
    """scale and minimum ≥ 0 of each part x [..., 32]: x ≈ scale · q - minimum, q of 0 to `largest`.

    Several spacings are tried. For each, the values are rounded, then the best scale and minimum
    for these numbers are computed. Large values count for more.
    """
    weight = _root(x.square().mean(-1, keepdim=True)) + x.abs()
    floor = x.amin(-1, keepdim=True).clamp(max=0)
    spread = x.amax(-1, keepdim=True) - floor
    sum_w, sum_x = _sum(weight), _sum(weight * x)
    weighted = weight * x
    scale, base = spread / largest, floor
    q = ((x - floor) * _inverse(scale)).round().clamp(0, largest)
    error = _sum(weight * (scale * q + base - x).square())
    inverse_spread = _inverse(spread)
    for step in range(steps):
        q = (x - floor) * ((largest + first + 0.1 * step) * inverse_spread)
        q = q.round_().clamp_(0, largest)
        wq = weight * q
        sum_q, sum_qq, sum_qx = _sum(wq), _sum(wq * q), _sum(weighted * q)
        determinant = sum_w * sum_qq - sum_q * sum_q
        inverse = _inverse(determinant)
        new_scale = (sum_w * sum_qx - sum_x * sum_q) * inverse
        new_base = (sum_qq * sum_x - sum_q * sum_qx) * inverse
        # The minimum is stored without a sign.
        positive = new_base > 0
        new_scale = torch.where(positive, sum_qx * _inverse(sum_qq), new_scale)
        new_base = new_base.clamp(max=0)
        new_error = _sum(weight * (new_scale * q + new_base - x).square())
        better = (determinant > 0) & (new_error < error)
        scale = torch.where(better, new_scale, scale)
        base = torch.where(better, new_base, base)
        error = torch.where(better, new_error, error)
    return scale.squeeze(-1), -base.squeeze(-1)


def _symmetric_scale(x: Tensor, levels: int) -> Tensor:
    """The scale [..., 1] of each part x [..., k], so that x ≈ scale · q with q of -levels to
    levels - 1. Tries several, weighted by x²."""
    size = x.abs()
    extreme = _most(x, size, dim=-1)
    usable = extreme.abs() > TINY
    inverse_extreme = torch.where(usable, -1 / extreme, 0)
    weight = x.square()
    weighted = weight * x
    best = torch.zeros_like(extreme)
    scale = torch.zeros_like(extreme)
    for step in (0, *range(-9, 0), *range(1, 10)):
        q = (x * ((levels + 0.1 * step) * inverse_extreme)).round_().clamp_(-levels, levels - 1)
        sum_qx, sum_qq = _sum(weighted * q), _sum(weight * q * q)
        new_scale = sum_qx * _inverse(sum_qq)
        gain = new_scale * sum_qx
        better = gain > best
        scale = torch.where(better, new_scale, scale)
        best = torch.where(better, gain, best)
    return scale


def _root(x: Tensor) -> Tensor:
    """NumPy's is correctly rounded. torch's is MKL's, whose last bit depends on the CPU, while a
    quantised file has the same bytes everywhere."""
    return torch.from_numpy(np.sqrt(x.numpy()))


def _sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _most(x: Tensor, size: Tensor, dim: int) -> Tensor:
    """The element of x with the largest `size`, with its sign."""
    return x.gather(dim, size.argmax(dim, keepdim=True))


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0."""
    return torch.where(x == 0, 0, 1 / x)


def _rounded(x: Tensor) -> Tensor:
    """To fp16 and back."""
    return x.half().float()


def _half(x: Tensor) -> Tensor:
    """[n, 1] → its fp16 number as bytes [n, 2]."""
    return x.half().view(torch.uint8)


def _signed(x: Tensor) -> Tensor:
    return x.to(torch.int8).view(torch.uint8)
