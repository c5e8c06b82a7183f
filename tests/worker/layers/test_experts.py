"""Experts as single MLPs and as one grouped product compute the same."""

from __future__ import annotations

import pytest
import torch

from worker.layers import experts
from worker.layers.experts import SparseMLP
from worker.layers.linear import LinearFactory
from worker.layers.mlp import ACTIVATIONS
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
    monkeypatch.setattr(experts, "runs_grouped", lambda device: True)
    grouped = made(weights, act)
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    torch.testing.assert_close(grouped(x), single(x), atol=1e-4, rtol=1e-4)
