"""Gated delta nets on GPUs, in Triton: the causal convolution and the recurrence of a token of each
sequence, in one pass over the state, and the gates and the norm of any tokens.

A row with a slot below 0 changes no state; it gives zeros. Importing this needs the package
`triton`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton_launch import kernel

CHANNELS = 256  # of a program of the convolution
STATE = 4096  # elements of the state in a program of the recurrence
L2_EPS = 1e-6


def convolve(cache: Tensor, slots: Tensor, inputs: Tensor, weights: Tensor) -> Tensor:
    """As that of `worker.kernels.delta_net`, in the dtype of inputs; each row belongs to another
    sequence."""
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    rows, channels = inputs.shape
    y = torch.empty(rows, channels, dtype=inputs.dtype, device=inputs.device)
    with torch.cuda.device_of(inputs):  # Triton starts kernels on the current device
        _convolve(
            (rows, triton.cdiv(channels, CHANNELS)),
            *(cache, slots, inputs, weights, y, inputs.stride(0), channels),
            taps=len(weights),
            block=CHANNELS,
            warps=2,
        )
    return y


def recur(
    state: Tensor, slots: Tensor, y: Tensor, log_decay: Tensor, beta: Tensor, key_heads: int
) -> Tensor:
    """As that of `worker.kernels.delta_net`; each row belongs to another sequence."""
    _, heads, key_dim, value_dim = state.shape
    log_decay, beta = log_decay.contiguous(), beta.contiguous()
    out = torch.empty(len(y), heads, value_dim, dtype=torch.float32, device=y.device)
    width, block = part(key_dim, value_dim)
    with torch.cuda.device_of(y):
        _recur(
            (len(y), heads, triton.cdiv(value_dim, block)),
            *(state, slots, y, log_decay, beta, out),
            *(key_dim**-0.5, L2_EPS, y.shape[1], key_heads * key_dim, heads, heads // key_heads),
            key_dim=key_dim,
            value_dim=value_dim,
            width=width,
            block=block,
        )
    return out


def part(key_dim: int, value_dim: int) -> tuple[int, int]:
    """The channels of keys and of values in a program of the recurrence: powers of two."""
    width = triton.next_power_of_2(key_dim)
    return width, max(1, min(triton.next_power_of_2(value_dim), STATE // width))


def gates(a: Tensor, b: Tensor, decay: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logs of the decays, decay · softplus(a + bias), and the betas, sigmoid(b), in float32.
    a and b [tokens, heads]; decay and bias [heads] in float32."""
    tokens, heads = a.shape
    log_decay, beta = torch.empty(2, tokens, heads, dtype=torch.float32, device=a.device)
    with torch.cuda.device_of(a):
        _gates(
            (tokens,),
            *(a, b, decay, bias, log_decay, beta, a.stride(0), b.stride(0), heads),
            width=triton.next_power_of_2(heads),
            warps=1,
        )
    return log_decay, beta


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """norm(o) · silu(z) for o [tokens, heads, dim], with an RMS norm over dim, and z [tokens,
    heads * dim] → [tokens, heads * dim] in the dtype of z, to which o is rounded first."""
    tokens, heads, dim = o.shape
    o = o.contiguous()
    out = torch.empty(tokens, heads * dim, dtype=z.dtype, device=z.device)
    with torch.cuda.device_of(o):
        _gated_norm(
            (tokens, heads),
            *(o, z, weight, out, z.stride(0), eps, heads),
            dim=dim,
            width=triton.next_power_of_2(dim),
            warps=1,
        )
    return out


@kernel
def _convolve(
    cache, slots, inputs, weights, y, stride, channels, taps: tl.constexpr, block: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    c = tl.program_id(1) * block + tl.arange(0, block)
    real = (c < channels) & (slot >= 0)
    last = cache + slot * (taps - 1) * channels + c
    total = tl.zeros([block], tl.float32)
    for j in tl.static_range(taps):
        if j < taps - 1:
            value = tl.load(last + j * channels, mask=real, other=0.0)
        else:
            value = tl.load(inputs + row * stride + c, mask=real, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + j * channels + c, mask=real, other=0.0)
        if j > 0:
            tl.debug_barrier()  # all threads have read what is overwritten
            tl.store(last + (j - 1) * channels, value, mask=real)
    mixed = total.to(y.dtype.element_ty).to(tl.float32)
    mixed = mixed * tl.sigmoid(mixed)
    tl.store(y + row * channels + c, mixed.to(y.dtype.element_ty), mask=c < channels)


@kernel
def _recur(
    state,
    slots,
    y,
    log_decay,
    beta,
    out,
    scale,
    eps,
    channels,
    keys,
    heads,
    repeats,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, at = tl.load(slots + row), row * heads + head
    i, j = tl.arange(0, width), tl.program_id(2) * block + tl.arange(0, block)
    real_i, real_j = i < key_dim, j < value_dim
    own = y + row * channels + head // repeats * key_dim + i
    q = tl.load(own, mask=real_i, other=0.0).to(tl.float32)
    k = tl.load(own + keys, mask=real_i, other=0.0).to(tl.float32)
    values = y + row * channels + 2 * keys + head * value_dim + j
    v = tl.load(values, mask=real_j, other=0.0).to(tl.float32)
    q *= tl.rsqrt(tl.sum(q * q, 0) + eps) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + eps)
    real = real_i[:, None] & real_j[None, :] & (slot >= 0)
    to = state + ((slot * heads + head) * key_dim + i[:, None]) * value_dim + j[None, :]
    s = tl.load(to, mask=real, other=0.0) * tl.exp(tl.load(log_decay + at))
    change = tl.load(beta + at) * (v - tl.sum(s * k[:, None], 0))
    s += k[:, None] * change[None, :]
    tl.store(to, s, mask=real)
    result = tl.where(slot >= 0, tl.sum(s * q[:, None], 0), 0.0)
    tl.store(out + at * value_dim + j, result, mask=real_j)


@kernel
def _gates(a, b, decay, bias, log_decay, beta, a_row, b_row, heads, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, width)
    real = h < heads
    x = tl.load(a + row * a_row + h, mask=real, other=0.0).to(tl.float32)
    x += tl.load(bias + h, mask=real, other=0.0)
    y = tl.exp(tl.minimum(x, 20.0))
    more = 1.0 + y
    added = more - 1.0
    # log(1 + y) with the digits of y that the sum loses.
    softplus = tl.log(more) * (y / tl.where(added == 0.0, 1.0, added))
    softplus = tl.where(added == 0.0, y, softplus)
    softplus = tl.where(x <= 20.0, softplus, x)  # NaN stays
    g = tl.load(decay + h, mask=real, other=0.0) * softplus
    tl.store(log_decay + row * heads + h, g, mask=real)
    rounded = tl.load(b + row * b_row + h, mask=real, other=0.0)
    rounded = tl.sigmoid(rounded.to(tl.float32)).to(b.dtype.element_ty)
    tl.store(beta + row * heads + h, rounded.to(tl.float32), mask=real)


@kernel
def _gated_norm(o, z, weight, out, stride, eps, heads, dim: tl.constexpr, width: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, width)
    real = d < dim
    at = (row * heads + head) * dim + d
    x = tl.load(o + at, mask=real, other=0.0).to(out.dtype.element_ty).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) / dim + eps) * tl.load(weight + d, mask=real, other=0.0)
    gate = tl.load(z + row * stride + head * dim + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, (x * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=real)
