"""Linear layers: merged parts, bias, split direction, and the packed layout against F.linear."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.linear import Linear, LinearFactory, Split, Store
from worker.layers.weights import dense, onednn
from worker.layers.weights.bf16 import Bf16Weight, served
from worker.layers.weights.dense import DenseWeight, merge
from worker.layers.weights.linear_weight import LinearWeight
from worker.layers.weights.onednn import OneDnnWeight
from worker.layers.weights.quantised_tensor import Weight

CPU = torch.device("cpu")
IN, PARTS = 32, (40, 8, 16)
Layout = type[DenseWeight] | type[OneDnnWeight] | type[Bf16Weight]
LAYOUTS: dict[str, tuple[Layout, torch.dtype]] = {
    "dense fp32": (DenseWeight, torch.float32),
    "dense bf16": (DenseWeight, torch.bfloat16),
    "packed bf16": (OneDnnWeight, torch.bfloat16),
    "native bf16": (Bf16Weight, torch.bfloat16),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(parts: tuple[int, ...]) -> list[torch.Tensor]:
    return [random(part, IN, seed=index) for index, part in enumerate(parts)]


@pytest.fixture(params=LAYOUTS, ids=lambda name: name.replace(" ", "-"))
def layout(request: pytest.FixtureRequest) -> tuple[Store, torch.dtype]:
    kind, dtype = LAYOUTS[request.param]
    if kind is OneDnnWeight and not onednn.supports(dtype, CPU):
        pytest.skip("the CPU has no bf16 instructions")
    if kind is Bf16Weight and not served(torch.empty(32, IN, dtype=dtype)):
        pytest.skip("there are no kernels")

    def store(parts: Sequence[Weight]) -> LinearWeight:
        return kind(merge([part for part in parts if isinstance(part, Tensor)], dtype, CPU))

    return store, dtype


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == expected.dtype
    # bf16 rounds the same sums once; fp32 adds them in another order at most.
    tolerance = 1e-5 if ours.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(ours, expected, atol=tolerance * 8, rtol=tolerance)


# Around the limits of the layouts: one row, PACKED_FOR_ROWS, multiples of ROUND_ROWS and their
# neighbours, and more rows than MOST.
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 23, 24, 25, 63, 257])
@pytest.mark.parametrize("parts", [(40,), PARTS], ids=["single", "merged"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_a_linear_equals_f_linear_of_its_concatenated_parts(
    layout: tuple[Store, torch.dtype],
    parts: tuple[int, ...],
    biased: bool,
    rows: int,
) -> None:
    store, dtype = layout
    zeros = torch.zeros(sum(parts), dtype=dtype) if biased else None
    linear = Linear(IN, parts, Split.COLUMN, store, zeros)
    biases = [random(part, seed=90 + index) for index, part in enumerate(parts)]
    for index in reversed(range(len(parts))):  # checkpoints may have any order
        linear.weight_slot(index).load(tensors(parts)[index])
        if biased:
            linear.bias_slot(index).load(biases[index])
    x = random(rows, IN, seed=7).to(dtype)
    bias = torch.cat(biases).to(dtype) if biased else None
    expected = F.linear(x, torch.cat(tensors(parts)).to(dtype), bias)
    output = linear(x)
    assert output.shape == (rows, sum(parts))
    close(output, expected)


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, dense.WIDENED_ROWS, 50])
def test_a_cpu_without_bf16_instructions_multiplies_in_float32(
    monkeypatch: pytest.MonkeyPatch, rows: int, biased: bool
) -> None:
    monkeypatch.setattr(dense, "bf16_is_fast", lambda: False)
    monkeypatch.setattr(dense, "WIDENED_VALUES", 7 * IN)  # the last part is smaller
    weight, x = random(40, IN, seed=1).bfloat16(), random(rows, IN, seed=2).bfloat16()
    bias = random(40, seed=3).bfloat16() if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(dense.linear(x, weight, bias), exact.bfloat16())
    kinds: list[torch.dtype] = []
    product = F.linear

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kinds.append(x.dtype)
        return product(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    DenseWeight(weight)(x, bias)
    wide = rows >= dense.WIDENED_ROWS
    assert kinds == ([torch.float32] * 6 if wide else [torch.bfloat16])


def test_packed_rows_do_not_depend_on_the_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows are padded to a multiple of ROUND_ROWS, and only where the layout is not made for
    them."""
    if not onednn.supports(torch.bfloat16, CPU):
        pytest.skip("the CPU has no bf16 instructions")
    weight = OneDnnWeight(tensors((40,))[0].bfloat16())
    padded: list[int] = []
    pad = F.pad

    def watched(x: torch.Tensor, by: tuple[int, ...]) -> torch.Tensor:
        padded.append(by[-1])
        return pad(x, by)

    monkeypatch.setattr(F, "pad", watched)
    for rows in (1, 9, 16, 24):
        assert len(weight(random(rows, IN).bfloat16(), None)) == rows
    assert padded == []
    for rows in (17, 23, 25):
        assert len(weight(random(rows, IN).bfloat16(), None)) == rows
    assert padded == [7, 1, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [(40,), PARTS], ids=["single", "merged"])
def test_a_loaded_weight_keeps_no_reference_to_the_checkpoint(
    parts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """A tensor of the checkpoint is a view of the mapped file."""
    linear = LinearFactory(dtype, CPU).column(IN, *parts)
    given = [tensor.to(dtype) for tensor in tensors(parts)]
    for index, tensor in enumerate(given):
        linear.weight_slot(index).load(tensor)
    x = random(3, IN).to(dtype)
    before = linear(x)
    for tensor in given:
        tensor.zero_()
    assert torch.equal(linear(x), before)
    assert before.abs().max() > 0


def test_slots_have_the_shapes_of_the_checkpoint_tensors() -> None:
    linear = LinearFactory(torch.float32, CPU).column(IN, *PARTS, bias=True)
    assert [linear.weight_slot(i).shape for i in range(3)] == [(40, IN), (8, IN), (16, IN)]
    assert [linear.bias_slot(i).shape for i in range(3)] == [(40,), (8,), (16,)]


def test_a_factorys_methods_name_the_split() -> None:
    linears = LinearFactory(torch.float32, CPU)
    column, row, gate = linears.column(8, 6, 2), linears.row(6, 8), linears.replicated(8, 1)
    assert [linear.split for linear in (column, row, gate)] == [
        Split.COLUMN,
        Split.ROW,
        Split.REPLICATED,
    ]
    assert (column.in_features, column.parts, column.out_features) == (8, (6, 2), 8)
    assert (row.in_features, row.out_features) == (6, 8)


def test_an_empty_linear_takes_no_memory() -> None:
    """A model is built on the meta device before its weights are read."""
    linear = LinearFactory(torch.bfloat16, torch.device("meta")).column(10**6, 10**6, bias=True)
    assert linear.weight_slot().shape == (10**6, 10**6)
