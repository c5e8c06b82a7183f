"""Types that no kernel multiplies with are re-encoded as Q8_0; all others stay as they are."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from tests.worker.gguf.blocks import TYPES, random_blocks
from worker.kernels import build, library
from worker.kernels.formats import FORMATS
from worker.layers.embedding import Embedding, Head
from worker.layers.expert_linears import ExpertFactory
from worker.layers.linear import LinearFactory
from worker.layers.weights import triton
from worker.layers.weights.dequantising import DequantisingWeight
from worker.layers.weights.integer import IntegerWeight
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.layers.weights.storage import ProductKind, prepare, product_kind, reencode

CPU = torch.device("cpu")
ROWS, COLUMNS = 40, 256


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if library.active() is None:
        pytest.skip("this machine has no kernels")


def random_weight(kind: Type, rows: int = ROWS) -> QuantisedTensor:
    count = rows * COLUMNS // GGML_QUANT_SIZES[kind][0]
    blocks = torch.from_numpy(random_blocks(count, kind, seed=count))
    return QuantisedTensor(kind, (rows, COLUMNS), blocks.view(rows, -1))


def values(weight: QuantisedTensor) -> Tensor:
    return weight.dequantise(torch.float32)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_is_multiplied_with_by_the_kernels(kind: Type) -> None:
    weight = random_weight(kind)
    linear = LinearFactory(torch.float32, CPU).column(COLUMNS, ROWS, bias=True)
    bias = torch.randn(ROWS)
    linear.weight_slot().fill(weight)
    linear.bias_slot().fill(bias)
    assert isinstance(linear.weight, IntegerWeight)
    for rows in (1, 9):
        x = torch.randn(rows, COLUMNS)
        assert error(linear(x), x @ values(weight).T + bias) < 0.02
    chosen = product_kind(kind, COLUMNS, torch.float32, CPU, keep=False)
    assert chosen is (ProductKind.INTEGERS if kind.name in FORMATS else ProductKind.REENCODED)


def test_what_a_model_needs_is_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(build, "library_paths", lambda _, formats: asked.append(formats))
    prepare({Type.Q6_K, Type.Q4_K}, torch.bfloat16, CPU)
    prepare({Type.Q4_K, Type.IQ1_S}, torch.bfloat16, CPU)  # the latter is re-encoded
    assert asked == [[None, "Q4_K", "Q6_K"], [None, "Q4_K", "Q8_0"]]
    prepare(set(), torch.bfloat16, CPU)
    prepare({Type.Q4_K}, torch.float16, CPU)
    prepare({Type.Q4_K}, torch.bfloat16, torch.device("cuda"))
    assert len(asked) == 2


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_reencoding_changes_values_by_less_than_a_hundredth(kind: Type) -> None:
    weight = random_weight(kind)
    assert error(values(reencode(weight)), values(weight)) < 0.01


@pytest.mark.parametrize("kind", [Type.IQ3_S, Type.TQ2_0, Type.NVFP4], ids=lambda kind: kind.name)
def test_blocks_stay_where_they_are_on_request(kind: Type) -> None:
    weight = random_weight(kind)
    linear = LinearFactory(torch.float32, CPU, keep_quantised=True).column(COLUMNS, ROWS)
    linear.weight_slot().fill(weight)
    assert isinstance(linear.weight, DequantisingWeight)
    x = torch.randn(3, COLUMNS)
    assert error(linear(x), x @ values(weight).T) < 1e-5


def test_a_tied_head_is_reencoded_and_its_embedding_is_exact() -> None:
    table = random_weight(Type.IQ2_S)
    embedding = Embedding(ROWS, COLUMNS, torch.float32, CPU)
    head = Head(embedding, ROWS, COLUMNS, True, LinearFactory(torch.float32, CPU))
    head.weight_map("embed", "head")["embed"].fill(table)
    ids = torch.tensor([3, 39, 3])
    assert torch.equal(embedding(ids), values(table)[ids])
    x = torch.randn(2, COLUMNS)
    assert error(head(x), x @ values(table).T) < 0.02


def test_experts_of_reencoded_types() -> None:
    experts = ExpertFactory(2, LinearFactory(torch.float32, CPU)).column(COLUMNS, 8, 8)
    stack = [random_weight(Type.IQ3_XXS, 16), random_weight(Type.IQ1_M, 16)]
    for expert in range(2):
        for part in range(2):
            experts.weight_slot(expert, part).fill(stack[expert][8 * part : 8 * part + 8])
    x = torch.randn(5, COLUMNS)
    expected = torch.cat([x[:2] @ values(stack[0]).T, x[2:] @ values(stack[1]).T])
    assert error(experts(x, torch.tensor([2, 3])), expected) < 0.02


def test_nothing_is_reencoded_where_no_kernel_would_multiply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert product_kind(Type.IQ3_S, 256, torch.float16, CPU, keep=False) is ProductKind.DEQUANTISED
    monkeypatch.setattr(library, "active", lambda: None)
    assert product_kind(Type.IQ3_S, 256, torch.float32, CPU, keep=False) is ProductKind.DEQUANTISED
    assert product_kind(Type.Q4_K, 256, torch.float32, CPU, keep=False) is ProductKind.DEQUANTISED


def test_types_without_a_triton_kernel_are_reencoded_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "multiplies", lambda kind: kind in (Type.Q8_0, Type.Q4_K))
    cuda = torch.device("cuda")
    assert product_kind(Type.Q4_K, 256, torch.bfloat16, cuda, keep=False) is ProductKind.TRITON
    assert product_kind(Type.IQ3_S, 256, torch.bfloat16, cuda, keep=False) is ProductKind.REENCODED
    assert product_kind(Type.Q5_0, 256, torch.bfloat16, cuda, keep=True) is ProductKind.DEQUANTISED
    assert product_kind(Type.IQ3_S, 256, torch.bfloat16, cuda, keep=True) is ProductKind.PLAIN
