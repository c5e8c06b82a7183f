"""Norms, gated activations, queries and keys, and the greatest logit: `src/elementwise.cpp`.

Callers check `library.serves` for the first tensor of a call. Results equal torch's up to one
rounding: intermediate values stay in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.kernels import library
from worker.kernels.library import TYPE_CODES

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "clamped": 2}  # the codes in src/elementwise.cpp
MAX_HEAD = 1024  # channels of a head in src/elementwise.cpp


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension, [..., size]."""
    rows, stride = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    _rms_norm(rows, stride, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, and its norm: [..., size] each."""
    x, delta = x.contiguous(), delta.contiguous()
    total, out = torch.empty_like(x), torch.empty_like(x)
    _rms_norm(x, x.shape[-1], delta, weight, total, out, eps)
    return total, out


def _rms_norm(
    x: Tensor,
    stride: int,
    delta: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    eps: float,
) -> None:
    size = x.shape[-1]
    library.require().rms_norm(
        x.data_ptr(),
        stride,
        None if delta is None else delta.data_ptr(),
        weight.data_ptr(),
        None if total is None else total.data_ptr(),
        out.data_ptr(),
        x.numel() // size,
        size,
        eps,
        TYPE_CODES[x.dtype],
        TYPE_CODES[weight.dtype],
        torch.get_num_threads(),
    )


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x as rows of its last dimension, and the distance between them: without a copy if x is
    [rows, size] with adjacent elements."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    return x.contiguous(), x.shape[-1]


def add_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a + b: contiguous, of one dtype; b has the shape of a, or that of its rows."""
    size = b.shape[-1]
    library.require().add_tensors(
        a.data_ptr(),
        b.data_ptr(),
        size if b.dim() == a.dim() else 0,
        out.data_ptr(),
        a.numel() // size,
        size,
        TYPE_CODES[a.dtype],
        torch.get_num_threads(),
    )


def gated_activation(
    gate: Tensor, up: Tensor, kind: str, *, slope: float = 0.0, limit: float = 0.0
) -> Tensor:
    """activation(gate) * up, [rows, inner]. Both may be halves of one tensor. "clamped":
    (up + 1) * gate * sigmoid(slope * gate), with gate at most `limit` and up within ±limit."""
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    rows, inner = gate.shape
    out = torch.empty(rows, inner, dtype=gate.dtype)
    library.require().gated_activation(
        gate.data_ptr(),
        up.data_ptr(),
        gate.stride(0),
        out.data_ptr(),
        rows,
        inner,
        ACTIVATIONS[kind],
        slope,
        limit,
        TYPE_CODES[gate.dtype],
        torch.get_num_threads(),
    )
    return out


def prepare_queries_and_keys(
    q: Tensor,
    k: Tensor,
    norms: tuple[tuple[Tensor, float], tuple[Tensor, float]] | None,
    rotation: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Norm per head and rotary positions. q [rows, heads, dim] and k [rows, kv_heads, dim], with
    adjacent heads → the same shapes, contiguous.

    `norms`: the weight [dim] and eps of each, with one dtype. `rotation`: cos and signed sin
    [rows, 1, turned] for the first `turned` channels, in the dtype of q.
    """
    (rows, heads, dim), kv_heads = q.shape, k.shape[1]
    q, k = _adjacent(q), _adjacent(k)
    q_out = torch.empty(rows, heads, dim, dtype=q.dtype)
    k_out = torch.empty(rows, kv_heads, dim, dtype=q.dtype)
    (q_norm, q_eps), (k_norm, k_eps) = norms or ((None, 0.0), (None, 0.0))
    cos, sin = (part.contiguous() for part in rotation) if rotation else (None, None)
    library.require().prepare_queries_and_keys(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        q_eps,
        k_eps,
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        0 if cos is None else cos.shape[-1],
        q_out.data_ptr(),
        k_out.data_ptr(),
        rows,
        heads,
        kv_heads,
        dim,
        TYPE_CODES[q.dtype],
        TYPE_CODES[q.dtype if q_norm is None else q_norm.dtype],
        torch.get_num_threads(),
    )
    return q_out, k_out


def _adjacent(x: Tensor) -> Tensor:
    """x [rows, heads, dim] with its heads adjacent in memory: itself if they are."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The greatest value of each row of x [rows, size] and its first index, both [rows]; equal to
    torch.max(x.float(), dim=-1)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, size = x.shape
    values = torch.empty(rows, dtype=torch.float32)
    indices = torch.empty(rows, dtype=torch.int64)
    library.require().argmax(
        x.data_ptr(),
        x.stride(0),
        values.data_ptr(),
        indices.data_ptr(),
        rows,
        size,
        TYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return values, indices


def gather_into(out: Tensor, table: Tensor, numbers: Tensor, first: int = 0) -> None:
    """out = the rows with these numbers, int64: contiguous. The table has those from `first` on;
    others are 0."""
    library.require().gather_rows(
        table.data_ptr(),
        first,
        len(table),
        numbers.data_ptr(),
        out.data_ptr(),
        len(numbers),
        table.stride(0) * table.element_size(),
    )


def add_number_into(out: Tensor, x: Tensor, number: int) -> None:
    """out = x + number: int64, contiguous."""
    library.require().add_to_integers(x.data_ptr(), number, out.data_ptr(), x.numel())


def multiply_into(out: Tensor, x: Tensor, factor: float) -> None:
    """out = x * factor: contiguous, of one dtype."""
    library.require().multiply(x.data_ptr(), factor, out.data_ptr(), x.numel(), TYPE_CODES[x.dtype])


def join_into(out: Tensor, parts: Sequence[Tensor]) -> None:
    """out [rows, size] = the parts side by side, each [rows, n] with adjacent elements."""
    start, size = out.data_ptr(), out.element_size()
    for part in parts:
        rows, columns = part.shape
        library.require().copy_rows(
            part.data_ptr(),
            part.stride(0) * size,
            start,
            out.stride(0) * size,
            rows,
            columns * size,
        )
        start += columns * size
