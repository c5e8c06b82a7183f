"""Norms, rotary positions and gated activations on GPUs, in Triton: one kernel each, where torch
starts several.
Sums and products are float32. Importing this needs the package `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton_launch import kernel

COLUMNS = 1024  # of a program of the gated activation
KINDS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, in their dtype, and its norm: [..., size] each, contiguous."""
    x, delta = x.contiguous(), delta.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    size = x.shape[-1]
    width = triton.next_power_of_2(size)
    with torch.cuda.device_of(x):  # Triton starts kernels on the current device
        _add_rms_norm(
            (x.numel() // size,),
            x,
            delta,
            weight,
            total,
            out,
            eps,
            size,
            width=width,
            warps=min(16, max(1, width // 256)),
        )
    return total, out


def gated_activation(
    gate: Tensor, up: Tensor, kind: str, *, slope: float = 0.0, limit: float = 0.0
) -> Tensor:
    """As that of `worker.kernels.elementwise`."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    rows, inner = gate.shape
    out = torch.empty(rows, inner, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):
        _gated(
            (rows, triton.cdiv(inner, COLUMNS)),
            gate,
            up,
            out,
            gate.stride(0),
            inner,
            slope,
            limit,
            kind=KINDS[kind],
            width=COLUMNS,
        )
    return out


def prepare_queries_and_keys(
    q: Tensor,
    k: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
    rotation: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """As that of `worker.kernels.elementwise`."""
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    q_out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    k_out = torch.empty(rows, kv_heads, dim, dtype=k.dtype, device=k.device)
    (q_weight, q_eps), (k_weight, k_eps) = norms or ((q, 0.0), (k, 0.0))
    cos, sin = rotation or (q, q)
    with torch.cuda.device_of(q):
        _prepare(
            (rows, heads + kv_heads),
            q,
            k,
            q_out,
            k_out,
            q_weight,
            k_weight,
            cos,
            sin,
            *(q_eps, k_eps),
            *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos.stride(0)),
            heads,
            kv_heads,
            dim=dim,
            width=triton.next_power_of_2(dim),
            turned=cos.shape[-1] if rotation else 0,
            normed=norms is not None,
            warps=1,
        )
    return q_out, k_out


@kernel
def _add_rms_norm(x, delta, weight, total, out, eps, size, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    d = tl.arange(0, width)
    real = d < size
    added = tl.load(x + row + d, mask=real, other=0.0).to(tl.float32)
    added += tl.load(delta + row + d, mask=real, other=0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row + d, rounded, mask=real)
    added = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(added * added, 0) / size + eps)
    weights = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row + d, (added * factor * weights).to(out.dtype.element_ty), mask=real)


@kernel
def _gated(gate, up, out, stride, inner, slope, limit, kind: tl.constexpr, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * width + tl.arange(0, width)
    real = d < inner
    g = tl.load(gate + row * stride + d, mask=real, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + d, mask=real, other=0.0).to(tl.float32)
    if kind == 0:
        y = g * tl.sigmoid(g) * u
    elif kind == 1:
        inside = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        y = g * tl.sigmoid(2 * inside) * u  # 1 + tanh(z) = 2 · sigmoid(2 z)
    else:
        g = tl.minimum(g, limit)
        u = tl.minimum(tl.maximum(u, -limit), limit)
        y = (u + 1) * g * tl.sigmoid(slope * g)
    tl.store(out + row * inner + d, y.to(out.dtype.element_ty), mask=real)


@kernel
def _prepare(
    q,
    k,
    q_out,
    k_out,
    q_weight,
    k_weight,
    cos,
    sin,
    q_eps,
    k_eps,
    q_row,
    q_head,
    k_row,
    k_head,
    turn_row,
    heads,
    kv_heads,
    dim: tl.constexpr,
    width: tl.constexpr,
    turned: tl.constexpr,
    normed: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if head < heads:
        x = q + row * q_row + head * q_head
        out = q_out + (row * heads + head) * dim
        weight, eps = q_weight, q_eps
    else:
        x = k + row * k_row + (head - heads) * k_head
        out = k_out + (row * kv_heads + head - heads) * dim
        weight, eps = k_weight, k_eps
    d = tl.arange(0, width)
    real = d < dim
    mine = tl.load(x + d, mask=real, other=0.0).to(tl.float32)
    factor = 1.0
    if normed:
        factor = tl.rsqrt(tl.sum(mine * mine, 0) / dim + eps)
        mine = mine * factor * tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
    if turned > 0:
        turns = d < turned
        other = tl.where(d < turned // 2, d + turned // 2, d - turned // 2)
        pair = tl.load(x + other, mask=turns, other=0.0).to(tl.float32)
        if normed:
            pair = pair * factor * tl.load(weight + other, mask=turns, other=0.0).to(tl.float32)
        c = tl.load(cos + row * turn_row + d, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + row * turn_row + d, mask=turns, other=0.0).to(tl.float32)
        mine = mine * c + pair * s
    tl.store(out + d, mine.to(q_out.dtype.element_ty), mask=real)
