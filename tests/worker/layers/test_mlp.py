"""The gated MLP, against its formula."""

from __future__ import annotations

import pytest
import torch

from worker.layers.linear import LinearFactory, Split
from worker.layers.mlp import ACTIVATIONS, GatedMLP

HIDDEN, INNER = 6, 10


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_a_gated_mlp_is_its_formula(act: str, bias: bool) -> None:
    linears = LinearFactory(torch.float32, torch.device("cpu"))
    mlp = GatedMLP(HIDDEN, INNER, linears, act=ACTIVATIONS[act], bias=bias)
    random = torch.Generator().manual_seed(0)
    given = {}
    for name, slot in mlp.weight_map("mlp").items():
        given[name] = torch.randn(slot.shape, generator=random)
        slot.load(given[name])
    assert len(given) == (6 if bias else 3)
    x = torch.randn(5, HIDDEN, generator=random)

    def project(name: str, x: torch.Tensor) -> torch.Tensor:
        y = x @ given[f"mlp.{name}_proj.weight"].T
        return y + given[f"mlp.{name}_proj.bias"] if bias else y

    expected = project("down", ACTIVATIONS[act](project("gate", x)) * project("up", x))
    torch.testing.assert_close(mlp(x), expected, atol=1e-5, rtol=1e-5)


def test_an_mlp_splits_its_inner_channels() -> None:
    mlp = GatedMLP(HIDDEN, INNER, LinearFactory(torch.float32, torch.device("cpu")))
    assert mlp._gate_up.split is Split.COLUMN
    assert mlp._down.split is Split.ROW
