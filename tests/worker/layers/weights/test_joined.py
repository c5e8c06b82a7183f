"""Merged linears whose tensors are multiplied in several ways: each has its own product, and blocks
with integer products are never dequantised."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from tests.worker.gguf.blocks import random_blocks
from worker.kernels import library, recording
from worker.layers.linear import LinearFactory
from worker.layers.weights.integer import IntegerWeight
from worker.layers.weights.linear_weight import JoinedWeight
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight

pytestmark = pytest.mark.skipif(library.active() is None, reason="needs the CPU kernels")

CPU = torch.device("cpu")
COLUMNS = 256


def blocks(kind: Type, rows: int) -> QuantisedTensor:
    size = random_blocks(1, kind, seed=1).shape[-1]
    values = COLUMNS // (256 if kind.name.endswith(("K", "_S")) else 32)
    found = torch.from_numpy(random_blocks(rows * values, kind, seed=rows))
    return QuantisedTensor(kind, (rows, COLUMNS), found.view(rows, values * size))


PLAIN = torch.randn(33, COLUMNS, generator=torch.Generator().manual_seed(1))
MERGED: dict[str, tuple[Weight, ...]] = {
    "plain values": (blocks(Type.Q4_K, 64), blocks(Type.Q5_0, 32), PLAIN),
    "plain keys": (blocks(Type.Q4_K, 64), PLAIN, blocks(Type.Q5_0, 32)),
    "plain gate": (PLAIN, PLAIN + 1, blocks(Type.Q6_K, 33)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MERGED)
def test_each_part_has_the_product_that_it_has_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(QuantisedTensor, "dequantise", None)  # it is not called
    parts = MERGED[name]
    linears = LinearFactory(dtype, CPU)
    merged = linears.column(COLUMNS, *(part.shape[0] for part in parts), bias=True)
    bias = torch.cat([torch.randn(part.shape[0]) for part in parts])
    start = 0
    alone = []
    for index, part in enumerate(parts):
        merged.weight_slot(index).fill(part)
        merged.bias_slot(index).fill(bias[start : start + part.shape[0]])
        start += part.shape[0]
        single = linears.column(COLUMNS, part.shape[0])
        single.weight_slot().fill(part)
        alone.append(single)
    assert isinstance(merged.weight, JoinedWeight)
    for rows in (1, 9, 40):
        x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = torch.cat([single(x) for single in alone], dim=1) + bias.to(dtype)
        torch.testing.assert_close(merged(x), expected, rtol=1e-6, atol=1e-5)


def test_kept_blocks_leave_their_neighbours_the_integer_product() -> None:
    parts = (blocks(Type.IQ3_S, 16), blocks(Type.Q4_K, 16), blocks(Type.Q6_K, 16))
    linear = LinearFactory(torch.float32, CPU, keep_quantised=True).column(COLUMNS, 16, 16, 16)
    for index, part in enumerate(parts):
        linear.weight_slot(index).fill(part)
    assert isinstance(linear.weight, JoinedWeight)
    kept, multiplied = linear.weight._weights
    assert isinstance(multiplied, IntegerWeight) and not isinstance(kept, IntegerWeight)
    x = torch.randn(3, COLUMNS)
    expected = torch.cat([x @ part.dequantise(torch.float32).T for part in parts], dim=1)
    assert float((linear(x) - expected).norm() / expected.norm()) < 0.02


def test_the_products_are_recorded() -> None:
    parts: tuple[Weight, ...] = (blocks(Type.Q4_K, 32), PLAIN)
    linear = LinearFactory(torch.bfloat16, CPU).column(COLUMNS, 32, 33)
    for index, part in enumerate(parts):
        linear.weight_slot(index).fill(part)
    x = torch.ones(4, COLUMNS, dtype=torch.bfloat16)
    with torch.inference_mode(), recording.record(recording.Arena()) as found:
        y = linear(x)
    assert found.refused is None
    x.copy_(torch.randn(4, COLUMNS))
    with torch.inference_mode():
        found.program()
        assert torch.equal(y, linear(x))
