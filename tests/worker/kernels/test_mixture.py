"""Routing by the kernels equals torch's, and their products of all experts equal single ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.kernels.test_quantised import pack, random_weight
from worker.kernels import mixture, quantised
from worker.kernels.library import Library
from worker.layers.experts import combine, group

examples = settings(max_examples=40)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@examples
@given(
    tokens=st.integers(0, 40) | st.just(700),
    experts=st.integers(1, 130),
    share=st.floats(0, 1),
    normalise=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_greatest_of_a_softmax_are_selected(
    kernels: Library,
    tokens: int,
    experts: int,
    share: float,
    normalise: bool,
    biased: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    top_k = 1 + int(share * (experts - 1))
    logits = random(seed, tokens, experts + 3)[:, :experts].to(dtype)
    bias = random(seed + 1, experts) if biased else None
    weights, chosen = mixture.select(logits, bias, top_k, normalise)
    shifted = logits.float() if bias is None else logits.float() + bias
    probabilities = shifted.double().softmax(-1)
    expected = probabilities.topk(top_k).values
    picked = probabilities.gather(1, chosen)
    assert torch.equal(picked, expected)  # which of several equal ones may differ
    assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    step = 2**-8 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(weights.double(), expected, rtol=step, atol=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_strange_logits_of_a_token_select_valid_experts(kernels: Library, value: float) -> None:
    logits = random(1, 3, 8)
    clean = mixture.select(logits, None, 4, True)
    logits[1] = value
    weights, chosen = mixture.select(logits, None, 4, True)
    assert weights[1].isnan().all() and sorted(chosen[1].tolist()) == [0, 1, 2, 3]
    for spoiled, kept in zip((weights, chosen), clean, strict=True):
        assert torch.equal(spoiled[[0, 2]], kept[[0, 2]])


@examples
@given(
    tokens=st.integers(0, 60),
    experts=st.integers(1, 20),
    size=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_pairs_are_grouped_and_combined(
    kernels: Library, tokens: int, experts: int, size: int, dtype: torch.dtype, seed: int
) -> None:
    top_k = 1 + seed % min(experts, 8)
    chosen = random(seed, tokens, experts).topk(top_k).indices.contiguous()
    grouped = mixture.group(chosen, experts)
    for ours, torchs in zip(grouped, group(chosen, experts), strict=True):
        assert torch.equal(ours, torchs)
    rows, places, counts = grouped
    assert torch.equal(counts, chosen.flatten().bincount(minlength=experts))
    assert torch.equal(rows[places.flatten()], torch.arange(tokens).repeat_interleave(top_k))
    outputs = random(seed, tokens * top_k, size).to(dtype)
    weights = random(seed + 1, tokens, top_k).to(dtype)
    y = mixture.combine(outputs, weights, places)
    exact = combine(outputs.double(), weights.double(), places)
    step = 2**-8 if dtype is torch.bfloat16 else 1e-5
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), exact, rtol=step, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts", [[1, 0, 1, 0, 3, 1], [0, 0, 8, 0, 9, 70], [2, 64, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
)
def test_quantised_matrices_with_rows_of_their_own(
    kernels: Library, counts: list[int], dtype: torch.dtype
) -> None:
    matrices = [
        [
            pack(random_weight("Q4_K" if index % 2 else "Q5_K", 48, 512, seed=index)),
            pack(random_weight("Q6_K", 80, 512, seed=10 + index)),
        ]
        for index in range(len(counts))
    ]
    x = random(1, sum(counts), 600)[:, 50:562].to(dtype)
    y = quantised.linear(x, quantised.Matrices(matrices), torch.tensor(counts))
    single = [
        quantised.linear(part, quantised.Matrices([parts]))
        for parts, part in zip(matrices, x.split(counts), strict=True)
    ]
    assert torch.equal(y, torch.cat(single))
