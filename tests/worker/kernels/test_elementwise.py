"""The elementwise kernels equal the same formulas in torch, for every type and tail."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import elementwise
from worker.kernels.library import Library
from worker.layers.rope import Rotation

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
ROWS, SIZES = st.integers(1, 40), st.integers(1, 200)
SPECIAL = st.sampled_from([None, float("nan"), float("inf"), float("-inf")])

examples = settings(max_examples=60)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, exact: Tensor, roundings: float = 1) -> None:
    """`exact` is float32. `actual` may differ from it by that many roundings of its dtype."""
    step = 2**-8 if actual.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        actual.float(), exact, rtol=roundings * step, atol=roundings * step * 0.01, equal_nan=True
    )


@examples
@given(rows=ROWS, size=SIZES, dtype=DTYPES, wide=st.booleans(), special=SPECIAL)
def test_rms_norm(
    kernels: Library, rows: int, size: int, dtype: torch.dtype, wide: bool, special: float | None
) -> None:
    x, weight = random(rows, size, dtype=dtype), random(size, seed=1)
    if not wide:
        weight = weight.to(dtype)
    if special is not None:
        x[-1, size // 2] = special
    exact = F.rms_norm(x.float(), (size,), weight.float(), 1e-6)
    assert_close(elementwise.rms_norm(x, weight, 1e-6), exact)


@examples
@given(rows=ROWS, size=SIZES, dtype=DTYPES)
def test_rms_norm_of_a_view_with_a_row_stride(
    kernels: Library, rows: int, size: int, dtype: torch.dtype
) -> None:
    x = random(rows, size + 5, dtype=dtype)[:, 3 : 3 + size]
    weight = random(size, dtype=dtype, seed=1)
    exact = F.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    assert_close(elementwise.rms_norm(x, weight, 1e-5), exact)


@examples
@given(rows=ROWS, size=SIZES, dtype=DTYPES)
def test_add_rms_norm(kernels: Library, rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=2)
    before = x.clone()
    weight = random(size, dtype=dtype, seed=1)
    total, normed = elementwise.add_rms_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(x, before)
    assert_close(normed, F.rms_norm((x + delta).float(), (size,), weight.float(), 1e-6))


@examples
@given(
    rows=ROWS,
    inner=st.integers(1, 1100),
    dtype=DTYPES,
    kind=st.sampled_from(["silu", "gelu_tanh", "clamped"]),
    special=SPECIAL,
    scale=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_gated_activation(
    kernels: Library,
    rows: int,
    inner: int,
    dtype: torch.dtype,
    kind: str,
    special: float | None,
    scale: float,
) -> None:
    gate_up = (random(rows, 2 * inner) * scale).to(dtype)
    if special is not None:
        gate_up[0, inner + inner // 2] = special
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    output = elementwise.gated_activation(gate, up, kind, slope=1.7, limit=7.0)
    gate, up = gate.float(), up.float()
    if kind == "clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1
        act = gate * torch.sigmoid(1.7 * gate)
    else:
        act = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(
        output.float(),
        act * up,
        rtol=2**-8 if dtype is torch.bfloat16 else 1e-5,
        atol=3e-5 * scale,  # 1 + tanh(x) cancels for negative x
        equal_nan=True,
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_at_the_ends_of_the_range(kernels: Library, kind: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -89.0, 0.0, 89.0, 1e4, 3e38, float("nan"), float("inf")]])
    output = elementwise.gated_activation(gate, torch.ones_like(gate), kind)
    expected = torch.clamp(gate, min=0)
    torch.testing.assert_close(output, expected, atol=1e-30, rtol=1e-6, equal_nan=True)


@examples
@given(
    rows=st.integers(1, 20),
    heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([2, 6, 16, 32, 48, 64, 96, 128, 256]),
    part=st.sampled_from([0.0, 0.5, 1.0]),
    normed=st.booleans(),
    wide=st.booleans(),
    dtype=DTYPES,
)
def test_queries_and_keys(
    kernels: Library,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    part: float,
    normed: bool,
    wide: bool,
    dtype: torch.dtype,
) -> None:
    turned = int(dim * part) // 2 * 2
    if not (turned or normed):
        return
    qkv = random(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
    weight_dtype = torch.float32 if wide else dtype
    weights = (random(dim, dtype=weight_dtype, seed=1), random(dim, dtype=weight_dtype, seed=2))
    angles = random(rows, 1, turned // 2, seed=3)
    cos = torch.cat([angles.cos()] * 2, dim=-1).to(dtype)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1).to(dtype)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        x = x.float()
        if normed:
            x = F.rms_norm(x, (dim,), weight.float(), 1e-6).to(dtype).float()
        return Rotation(cos.float(), sin.float())(x) if turned else x

    norms = ((weights[0], 1e-6), (weights[1], 1e-6))
    outputs = elementwise.prepare_queries_and_keys(
        q, k, norms if normed else None, (cos, sin) if turned else None
    )
    for x, weight, output in zip((q, k), weights, outputs, strict=True):
        assert output.shape == x.shape
        # The norm's rounding may fall the other way, which the rotation carries on.
        torch.testing.assert_close(
            output.float(), exact(x, weight), rtol=0, atol=0.05 if dtype is torch.bfloat16 else 1e-5
        )


@examples
@given(
    rows=st.integers(1, 6),
    size=st.integers(1, 3000),
    special=SPECIAL,
    where=st.floats(0, 1),
    levels=st.integers(1, 50),
    dtype=DTYPES,
)
def test_argmax(
    kernels: Library,
    rows: int,
    size: int,
    special: float | None,
    where: float,
    levels: int,
    dtype: torch.dtype,
) -> None:
    wide = (random(rows, size + 3) * levels).round() / levels  # of equal ones the first counts
    x = wide.to(dtype)[:, :size]
    if special is not None:
        x[rows // 2, int(where * (size - 1))] = special
    values, indices = elementwise.argmax(x)
    expected, _ = x.float().max(dim=-1)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    for row, best, index in zip(x.tolist(), expected.tolist(), indices.tolist(), strict=True):
        if best == best:
            assert index == row.index(best)
        else:
            assert row[index] != row[index]


def test_argmax_of_a_row_without_finite_logits(kernels: Library) -> None:
    values, indices = elementwise.argmax(torch.full((2, 40), float("-inf")))
    assert values.tolist() == [float("-inf")] * 2
    assert indices.tolist() == [0, 0]


@examples
@given(rows=ROWS, size=SIZES, dtype=DTYPES, whole=st.booleans())
def test_sums_have_the_bits_of_torch(
    kernels: Library, rows: int, size: int, dtype: torch.dtype, whole: bool
) -> None:
    a, b = random(rows, size, dtype=dtype), random(rows, size, dtype=dtype, seed=2)
    b = b if whole else b[0]
    out = torch.empty_like(a)
    elementwise.add_into(out, a, b)
    assert torch.equal(out, a + b)


@examples
@given(rows=ROWS, size=SIZES, dtype=st.sampled_from([torch.bfloat16, torch.int64]))
def test_gathered_rows(kernels: Library, rows: int, size: int, dtype: torch.dtype) -> None:
    table = (random(30, size) * 100).to(dtype)
    numbers = torch.arange(rows) * 7 % 30
    out = torch.empty(rows, size, dtype=dtype)
    elementwise.gather_into(out, table, numbers)
    assert torch.equal(out, table[numbers])
    elementwise.gather_into(out, table[10:20], numbers, first=10)
    others = (numbers < 10) | (numbers >= 20)
    assert torch.equal(out, table[numbers].masked_fill(others[:, None], 0))
    elementwise.add_number_into(numbers, numbers, 3)
    assert torch.equal(numbers, torch.arange(rows) * 7 % 30 + 3)
