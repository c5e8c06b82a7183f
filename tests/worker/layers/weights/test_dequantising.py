"""Linears, embeddings and heads whose checkpoint tensors are quantised blocks, without kernels:
tests/worker/kernels has those for the products of kernels."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import library
from worker.layers.embedding import Embedding, Head
from worker.layers.expert_linears import ExpertFactory
from worker.layers.linear import LinearFactory
from worker.layers.weights import dequantising
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight, place

Type = GGMLQuantizationType
CPU = torch.device("cpu")
IN = 256


@pytest.fixture(autouse=True)
def torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "active", lambda: None)


def quantised(kind: GGMLQuantizationType, *shape: int, seed: int = 0) -> QuantisedTensor:
    """Random blocks with finite scales of about 0.01."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8
    simple = QuantisedTensor(
        Type.Q8_0, shape, torch.from_numpy(quants.quantize(values.numpy(), Type.Q8_0))
    )
    if kind is Type.Q8_0:
        return simple
    size = {Type.Q4_K: 144, Type.Q6_K: 210}[kind]
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] // 256, size), dtype=torch.uint8)
    scale = torch.full((*bits.shape[:-1], 1), 2**-10, dtype=torch.float16).view(torch.uint8)
    for at in {Type.Q4_K: (0, 2), Type.Q6_K: (208,)}[kind]:
        bits[..., at : at + 2] = scale
    return QuantisedTensor(kind, shape, bits.flatten(-2))


def values(weight: Weight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantise(torch.float32)


MIXED: tuple[Weight, ...] = (
    quantised(Type.Q4_K, 40, IN),
    torch.randn(8, IN),
    quantised(Type.Q6_K, 16, IN, seed=1),
)


@pytest.mark.parametrize("chunk", [IN * 7, 1 << 20], ids=["in pieces", "whole"])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "parts",
    [MIXED, (quantised(Type.Q8_0, 40, IN),), (quantised(Type.Q4_K, 9, IN),) * 2],
    ids=["mixed types", "single", "same type"],
)
def test_a_linear_of_blocks_equals_one_of_their_values(
    parts: tuple[Weight, ...],
    biased: bool,
    rows: int,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dequantising, "PRODUCT_VALUES", chunk)
    sizes = [part.shape[0] for part in parts]
    linear = LinearFactory(torch.float32, CPU).column(IN, *sizes, bias=biased)
    biases = [torch.randn(size) for size in sizes]
    for index in reversed(range(len(parts))):
        linear.weight_slot(index).fill(parts[index])
        if biased:
            linear.bias_slot(index).fill(biases[index])
    x = torch.randn(rows, IN)
    merged = torch.cat([values(part) for part in parts])
    expected = F.linear(x, merged, torch.cat(biases) if biased else None)
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)


def test_a_linear_of_blocks_computes_in_its_dtype() -> None:
    tensor = quantised(Type.Q4_K, 40, IN)
    linear = LinearFactory(torch.bfloat16, CPU).column(IN, 40)
    linear.weight_slot().fill(tensor)
    x = torch.randn(3, IN).bfloat16()
    assert linear(x).dtype == torch.bfloat16
    expected = F.linear(x.float(), values(tensor))
    torch.testing.assert_close(linear(x).float(), expected, rtol=0.02, atol=0.05)


def test_a_merged_checkpoint_tensor_of_blocks_is_split_by_rows() -> None:
    tensor = quantised(Type.Q4_K, 24, IN)
    linear = LinearFactory(torch.float32, CPU).column(IN, 16, 8)
    linear.merged_slot().fill(tensor)
    x = torch.randn(2, IN)
    torch.testing.assert_close(linear(x), F.linear(x, values(tensor)), rtol=1e-4, atol=1e-4)


def test_a_linear_keeps_the_blocks_where_they_are() -> None:
    """As views of the mapped file: the values take no memory."""
    tensor = quantised(Type.Q8_0, 8, IN)
    linear = LinearFactory(torch.float32, CPU).column(IN, 8)
    linear.weight_slot().fill(tensor)
    tensor.blocks.zero_()
    assert not linear(torch.randn(2, IN)).any()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_dequantises_the_rows_it_returns(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = Embedding(50, IN, torch.float32, CPU)
    head = Head(embedding, 50, IN, tied, LinearFactory(torch.float32, CPU))
    given = {"embed": quantised(Type.Q6_K, 50, IN), "head": quantised(Type.Q4_K, 50, IN)}
    for name, slot in head.weight_map("embed", "head").items():
        slot.fill(given[name])
    ids = torch.tensor([3, 0, 3, 49])
    sizes: list[int] = []
    dequantise = QuantisedTensor.dequantise

    def watched(tensor: QuantisedTensor, dtype: torch.dtype) -> Tensor:
        sizes.append(tensor.shape[0])
        return dequantise(tensor, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(QuantisedTensor, "dequantise", watched)
        rows = embedding(ids)
    assert sizes == [4]
    assert torch.equal(rows, values(given["embed"])[ids])
    x = torch.randn(2, IN)
    expected = F.linear(x, values(given["embed" if tied else "head"]))
    torch.testing.assert_close(head(x), expected, rtol=1e-4, atol=1e-4)
    # A tied head reads the embedding's own blocks.
    given["embed"].blocks.zero_()
    assert bool(head(x).any()) is not tied


def test_experts_of_blocks_equal_those_of_their_values() -> None:
    experts = ExpertFactory(3, LinearFactory(torch.float32, CPU)).column(IN, 8, 8)
    stack = quantised(Type.Q4_K, 3, 16, IN)
    for expert in range(3):
        for part in range(2):
            experts.weight_slot(expert, part).fill(stack[expert][8 * part : 8 * part + 8])
    counts = torch.tensor([2, 0, 3])
    x = torch.randn(5, IN)
    expected = torch.cat([F.linear(x[:2], values(stack[0])), F.linear(x[2:], values(stack[2]))])
    torch.testing.assert_close(experts(x, counts), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", [Type.Q4_K, Type.IQ2_XXS], ids=lambda kind: kind.name)
def test_types_that_only_gguf_dequantises_are_plain_on_gpus(kind: Type, device: str) -> None:
    """Else each product would copy the weight to the host."""
    size = GGML_QUANT_SIZES[kind][1]
    tensor = QuantisedTensor(kind, (4, 256), torch.zeros(4, size, dtype=torch.uint8))
    placed = place(tensor, torch.bfloat16, torch.device(device))
    assert placed.device.type == device
    assert isinstance(placed, Tensor) is (kind is Type.IQ2_XXS and device == "meta")
    assert isinstance(placed, QuantisedTensor) or placed.dtype is torch.bfloat16
