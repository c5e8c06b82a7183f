"""All layouts of the experts compute the same."""

from __future__ import annotations

import pytest
import torch

from tests.worker.kernels.test_quantised import random_weight
from worker.kernels import library
from worker.layers import expert_linears
from worker.layers.expert_linears import (
    ExpertFactory,
    ExpertLinears,
    GroupedLinears,
    SeparateLinears,
)
from worker.layers.experts import SparseMLP
from worker.layers.linear import LinearFactory
from worker.layers.mlp import ACTIVATIONS
from worker.layers.weights.quantised_tensor import Weight
from worker.models.mixture import STACKED_EXPERTS

HIDDEN, INNER, COUNT, TOP = 16, 24, 5, 2


def made(weights: dict[str, torch.Tensor], act: str) -> SparseMLP:
    linears = LinearFactory(torch.float32, torch.device("cpu"))
    mlp = SparseMLP(
        HIDDEN,
        INNER,
        linears,
        experts=COUNT,
        top_k=TOP,
        normalise=True,
        act=ACTIVATIONS[act],
        stacked=STACKED_EXPERTS,
        shared_inner=INNER,
    )
    random = torch.Generator().manual_seed(1)
    for name, slot in mlp.weight_map("mlp").items():
        tensor = weights.setdefault(name, torch.randn(slot.shape, generator=random))
        slot.load(tensor)
    return mlp


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_grouped_experts_equal_single_ones(
    tokens: int, act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: dict[str, torch.Tensor] = {}
    single = made(weights, act)
    monkeypatch.setattr(expert_linears, "runs_grouped", lambda device: True)
    grouped = made(weights, act)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(grouped(x), single(x), atol=1e-4, rtol=1e-4)


COUNTS = [2, 0, 1, 4, 0]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [(INNER, INNER), (6,)])
def test_each_row_is_multiplied_with_the_weight_of_its_expert(
    parts: tuple[int, ...], bias: bool, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_linears, "runs_grouped", lambda device: grouped)
    factory = ExpertFactory(COUNT, LinearFactory(torch.float32, torch.device("cpu")))
    weights: ExpertLinears
    if len(parts) == 1:
        weights = factory.row(HIDDEN, *parts, bias=bias)
    else:
        weights = factory.column(HIDDEN, *parts, bias=bias)
    assert isinstance(weights, GroupedLinears if grouped else SeparateLinears)
    random = torch.Generator().manual_seed(2)
    full = torch.randn(COUNT, sum(parts), HIDDEN, generator=random)
    biases = torch.randn(COUNT, sum(parts), generator=random) * bias
    for expert in range(COUNT):
        start = 0
        for part, rows in enumerate(parts):
            slot = weights.weight_slot(expert, part)
            assert slot.shape == (rows, HIDDEN)
            slot.load(full[expert, start : start + rows])
            if bias:
                slot = weights.bias_slot(expert, part)
                assert slot.shape == (rows,)
                slot.load(biases[expert, start : start + rows])
            start += rows
    x = torch.randn(sum(COUNTS), HIDDEN, generator=random)
    owners = [expert for expert, count in enumerate(COUNTS) for _ in range(count)]
    expected = torch.stack(
        [full[owner] @ row + biases[owner] for owner, row in zip(owners, x, strict=True)]
    )
    torch.testing.assert_close(weights(x, torch.tensor(COUNTS)), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(library.active() is None, reason="needs the CPU kernels")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parts", [(32, 48), (24,)])
@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "MXFP4"])
def test_one_call_multiplies_with_all_experts(
    kind: str, parts: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory = ExpertFactory(COUNT, LinearFactory(torch.bfloat16, torch.device("cpu")))
    parts = tuple(16 * part for part in parts)
    weights = factory.column(64, *parts, bias=bias)
    random = torch.Generator().manual_seed(3)
    exact = torch.zeros(COUNT, sum(parts), 64, dtype=torch.float64)
    biases = torch.randn(COUNT, sum(parts), generator=random).bfloat16() * bias
    for expert in range(COUNT):
        start = 0
        for part, rows in enumerate(parts):
            weight: Weight = torch.randn(rows, 64, generator=random).bfloat16()
            if kind != "BF16":
                weight = random_weight(kind, rows, 64, seed=10 * expert + part)
            weights.weight_slot(expert, part).fill(weight)
            plain = weight if isinstance(weight, torch.Tensor) else weight.dequantise(torch.float32)
            exact[expert, start : start + rows] = plain.double()
            if bias:
                weights.bias_slot(expert, part).load(biases[expert, start : start + rows])
            start += rows
    x = torch.randn(sum(COUNTS), 64, generator=random).bfloat16()
    owners = torch.arange(COUNT).repeat_interleave(torch.tensor(COUNTS))
    expected = torch.einsum("roi,ri->ro", exact[owners], x.double()) + biases[owners].double()
    monkeypatch.setattr(expert_linears, "read_back", None)  # the loop over experts needs it
    y = weights(x, torch.tensor(COUNTS)).double()
    assert (y - expected).norm() < 0.02 * expected.norm()
