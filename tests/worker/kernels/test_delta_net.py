"""The delta net's decode kernels equal the layer's torch way: outputs, inputs and states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.kernels.nets import SLOTS, filled_net
from worker.kernels import library
from worker.kernels.library import Library
from worker.layers.batch import Batch, Span
from worker.layers.delta_net import DeltaShape
from worker.layers.recurrent_cache import RecurrentCache


@settings(max_examples=50)
@given(
    rows=st.integers(1, SLOTS),
    key_heads=st.integers(1, 3),
    per_key=st.integers(1, 3),
    key_dim=st.sampled_from([8, 16, 40, 128]),
    value_dim=st.sampled_from([5, 16, 40, 64, 96, 128]),
    kernel=st.integers(2, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 100),
)
def test_a_decode_step(
    kernels: Library,
    rows: int,
    key_heads: int,
    per_key: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = DeltaShape(key_heads, key_heads * per_key, key_dim, value_dim, kernel)
    random = torch.Generator().manual_seed(seed)
    heads = shape.value_heads
    wide = torch.randn(rows, shape.channels + 3, generator=random).to(dtype)
    u, g = wide[:, 3:], -torch.rand(rows, heads, generator=random)
    beta = torch.rand(rows, 2 * heads, generator=random)[:, :heads]
    slots = torch.randperm(SLOTS, generator=random)[:rows]

    def run() -> tuple[Tensor, RecurrentCache]:
        net, cache = filled_net(shape, dtype)
        return net._decode(u, g, beta, cache, slots), cache

    output, cache = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "active", lambda: None)
        expected, same = run()
    # One rounding of an intermediate value may fall the other way.
    tolerance = 0.05 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(cache.state, same.state, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.inputs, same.inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_one_sequence_are_computed_as_one_by_one(
    kernels: Library, dtype: torch.dtype
) -> None:
    """Chunks of 5 and 9 tokens, beside a token."""
    spans = [Span(3, 7, [1], 1), Span(1, 4, [1] * 5, 1), Span(4, 9, [1] * 9, 1)]
    net, together = filled_net(DeltaShape(2, 6, 40, 72, 4), dtype)
    _, alone = filled_net(DeltaShape(2, 6, 40, 72, 4), dtype)
    u = torch.randn(15, 592, generator=torch.Generator().manual_seed(6)).to(dtype)
    g, beta = -torch.rand(15, 6), torch.rand(15, 6)
    batch, _ = Batch.prepare(spans, torch.device("cpu"))
    assert batch.short is not None
    slots = batch.short.slots
    found = net._step(u, g, beta, together, slots)
    rows = [slice(row, row + 1) for row in range(15)]
    expected = [net._decode(u[at], g[at], beta[at], alone, slots[at]) for at in rows]
    assert torch.equal(found, torch.cat(expected))
    assert torch.equal(together.state, alone.state)
    assert torch.equal(together.inputs, alone.inputs)


def test_a_spoiled_row_does_not_affect_others(kernels: Library) -> None:
    net, cache = filled_net(DeltaShape(1, 2, 16, 16, 4), torch.float32)
    u = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    u[1] = float("nan")
    g, beta = torch.zeros(2, 2), torch.ones(2, 2)
    output = net._decode(u, g, beta, cache, torch.tensor([3, 1]))
    assert output[0].isfinite().all()
    assert output[1].isnan().all()
    assert cache.state[[0, 2, 3, 4]].isfinite().all()
