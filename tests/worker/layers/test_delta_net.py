"""Both implementations of the gated delta rule compute the same recurrence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.layers import delta_net
from worker.layers.delta_net import recur, recur_in_chunks

HEADS, KEY, VALUE = 3, 8, 5


def step_by_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The definition, per head and token, in float64."""
    out = torch.zeros(*v.shape, dtype=torch.float64)
    for head in range(HEADS):
        memory = state[head].double()
        for t in range(len(q)):
            memory = memory * g[t, head].double().exp()
            key, value = k[t, head].double(), v[t, head].double()
            memory = memory + torch.outer(key, beta[t, head].double() * (value - key @ memory))
            out[t, head] = q[t, head].double() @ memory
        state[head] = memory.to(state.dtype)
    return out


@settings(max_examples=40)
@given(length=st.integers(1, 200), seed=st.integers(0, 2**31), decay=st.floats(0.0, 20.0))
def test_chunks_and_single_tokens_are_the_same_recurrence(
    length: int, seed: int, decay: float
) -> None:
    random = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(length, HEADS, KEY, generator=random) for _ in range(2))
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(length, HEADS, VALUE, generator=random)
    g = -decay * torch.rand(length, HEADS, generator=random)
    beta = torch.rand(length, HEADS, generator=random)
    start = torch.randn(HEADS, KEY, VALUE, generator=random)

    exact, chunked, single = start.clone(), start.clone(), start[None].clone()
    expected = step_by_step(q, k, v, g, beta, exact).float()
    in_chunks = recur_in_chunks(q, k, v, g, beta, chunked)
    one_by_one = torch.cat(
        [
            recur(q[t, None], k[t, None], v[t, None], g[t, None], beta[t, None], single)
            for t in range(length)
        ]
    )
    for ours, state in ((in_chunks, chunked), (one_by_one, single[0])):
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(state, exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("g", [0.0, -20.0])
def test_chunks_of_identical_keys_are_the_same_recurrence(g: float) -> None:
    """Each token overwrites what the one before it has stored: the triangular system is full."""
    length, random = 2 * delta_net.CHUNK_LENGTH, torch.Generator().manual_seed(1)
    q = torch.randn(length, HEADS, KEY, generator=random)
    k = torch.randn(1, HEADS, KEY, generator=random)
    k = (k / k.norm(dim=-1, keepdim=True)).expand(length, -1, -1)
    v = torch.randn(length, HEADS, VALUE, generator=random)
    decays, beta = torch.full((length, HEADS), g), torch.ones(length, HEADS)
    start = torch.randn(HEADS, KEY, VALUE, generator=random)

    exact, chunked = start.clone(), start.clone()
    expected = step_by_step(q, k, v, decays, beta, exact).float()
    in_chunks = recur_in_chunks(q, k, v, decays, beta, chunked)
    torch.testing.assert_close(in_chunks, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(chunked, exact, atol=2e-5, rtol=2e-5)


def test_the_tried_lengths_span_several_chunks() -> None:
    """The property above covers several chunks and parts of one."""
    assert 3 * delta_net.CHUNK_LENGTH < 200
