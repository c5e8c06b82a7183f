"""Products with packed quantised weights equal products with the dequantised weights and rounded
activations, for every format, shape and level."""

from __future__ import annotations

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.kernels import quantised
from worker.kernels.formats import FORMATS
from worker.kernels.library import Library
from worker.layers.weights.quantise import quantise
from worker.layers.weights.quantised_tensor import QuantisedTensor

examples = settings(max_examples=120)
# Where the scales in fp16 of a block are.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}


def random_weight(name: str, rows: int, columns: int, seed: int) -> QuantisedTensor:
    """Blocks of random bytes: every bit pattern, with scales of a usual size."""
    random = torch.Generator().manual_seed(seed)
    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    blocks = torch.randint(0, 256, (rows * columns // values, size), generator=random)
    blocks = blocks.to(torch.uint8)
    for at in HALVES[name]:
        scale = torch.randn(len(blocks), 1, generator=random).to(torch.float16) / 100
        blocks[:, at : at + 2] = scale.view(torch.uint8)
    if kind is GGMLQuantizationType.MXFP4:  # a power of two
        blocks[:, 0] = 115 + blocks[:, 0] % 16
    return QuantisedTensor(kind, (rows, columns), blocks.view(rows, -1))


def pack(weight: QuantisedTensor) -> quantised.PackedBlocks:
    rows, columns = weight.shape
    return quantised.pack(weight.type.name, rows, columns, weight.blocks)


WIDE_FROM = 64  # rows that a matrix unit multiplies in bf16, where there is one


def product(x: Tensor, *parts: quantised.PackedBlocks) -> Tensor:
    return quantised.linear(x, quantised.Matrices([parts], WIDE_FROM))


def rounded(x: Tensor) -> Tensor:
    """x [rows, columns] with each 32 values rounded to 127 steps of their greatest."""
    groups = x.unflatten(1, (-1, 32))
    highest = groups.abs().amax(-1, keepdim=True)
    steps = (groups * (torch.full_like(highest, 127) / highest)).round()
    return (steps.double() * highest.double() / 127).flatten(1)


@examples
@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 67),  # of float32 beyond WIDE_FROM, too
    outputs=st.integers(1, 640),  # the last panel is often incomplete
    blocks=st.integers(1, 5),  # of the file: odd multiples of 32 channels, too
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_products(
    kernels: Library,
    name: str,
    rows: int,
    outputs: int,
    blocks: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    columns = blocks * FORMATS[name][1]
    weight = random_weight(name, outputs, columns, seed)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    y = product(x, pack(weight))
    dense = weight.dequantise(torch.float32).double()
    if kernels.level.name == "amx" and dtype is torch.bfloat16 and rows >= WIDE_FROM:
        exact = x.double() @ dense.bfloat16().double().T
    else:
        exact = rounded(x.float()) @ dense.T
    step = 2**-8 if dtype is torch.bfloat16 else 1e-5
    assert y.dtype is dtype
    torch.testing.assert_close(
        y.double(), exact, rtol=step, atol=step * float(exact.abs().max()) + 1e-6
    )


# Those that gguf can write, and whose own error is not as small as that of rounded activations.
WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")


@pytest.mark.parametrize("name", WRITTEN)
def test_rounded_activations_cost_less_than_the_quantisation(kernels: Library, name: str) -> None:
    random = torch.Generator().manual_seed(1)
    x, weight = torch.randn(16, 512, generator=random), torch.randn(64, 512, generator=random)
    stored = quantise(weight, GGMLQuantizationType[name])
    exact = x.double() @ stored.dequantise(torch.float32).double().T
    rounding = (product(x, pack(stored)) - exact).norm()
    quantisation = (x.double() @ weight.double().T - exact).norm()
    print(f"{name}: {rounding / quantisation:.3f}")
    assert 0 < rounding < 0.5 * quantisation


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("rows", [64, 65, 96, 131])
def test_products_of_a_prefill(kernels: Library, name: str, rows: int) -> None:
    """Odd numbers of panels and of rows, in bf16: as exact as rounding x or W once makes it."""
    weight = random_weight(name, 16 * 5 - 3, 512, seed=rows)
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
    exact = x.double() @ weight.dequantise(torch.float32).double().T
    y = product(x, pack(weight))
    error = (y.double() - exact).norm() / exact.norm()
    assert error < (0.004 if kernels.level.name == "amx" else 0.012)
    spoiled = x.clone()
    spoiled[rows - 3] = float("nan")
    again = product(spoiled, pack(weight))
    assert again[rows - 3].isnan().all()
    assert torch.equal(again[: rows - 3], y[: rows - 3])
    assert torch.equal(again[rows - 2 :], y[rows - 2 :])


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_row_is_the_same_in_every_batch(kernels: Library, name: str) -> None:
    weight = pack(random_weight(name, 75, 512, seed=1))
    x = torch.randn(33, 512, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([product(row[None], weight) for row in x])
    for rows in (2, 3, 7, 8, 9, 16, 21, 33):
        assert torch.equal(product(x[:rows], weight), alone[:rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_spoiled_row_does_not_affect_others(kernels: Library, value: float) -> None:
    weight = pack(random_weight("Q4_K", 32, 512, seed=1))
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    clean = product(x, weight)
    x[3, 100] = value
    spoiled = product(x, weight)
    assert spoiled[3].isnan().all()
    kept = [0, 1, 2, 4]
    assert torch.equal(spoiled[kept], clean[kept])


def test_an_outlier_does_not_coarsen_other_rows_or_blocks(kernels: Library) -> None:
    weight = random_weight("Q8_0", 16, 64, seed=1)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    x[0, 0] = 1e6
    y = product(x, pack(weight))
    exact = x[1:] @ weight.dequantise(torch.float32).T
    torch.testing.assert_close(y[1:], exact, rtol=0, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_of_a_table_are_those_that_torch_dequantises(
    kernels: Library, name: str, dtype: torch.dtype
) -> None:
    """Bit for bit: any number of times and in any order, and more than one thread computes."""
    columns = 3 * FORMATS[name][1]
    table = random_weight(name, 300, columns, seed=1)
    for count in (1, 7, 1000):
        numbers = torch.randint(300, (count,), generator=torch.Generator().manual_seed(count))
        found = quantised.rows(name, columns, table.blocks, numbers, dtype)
        assert torch.equal(found, table[numbers].dequantise(dtype))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_with_extreme_scales(kernels: Library, name: str) -> None:
    """Denormal, infinite and NaN scales, and all exponents of MXFP4."""
    columns = FORMATS[name][1]
    table = random_weight(name, 256, columns, seed=1)
    for at in HALVES[name]:
        table.blocks[:, at] = torch.arange(256, dtype=torch.uint8)
        table.blocks[:, at + 1] = torch.tensor([0, 0x7C, 0xFC, 0x80], dtype=torch.uint8).repeat(64)
    if name == "MXFP4":
        table.blocks[:, 0] = torch.arange(256, dtype=torch.uint8)
    found = quantised.rows(name, columns, table.blocks, torch.arange(256), torch.float32)
    expected = table.dequantise(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_zeros_and_denormals_give_zero(kernels: Library) -> None:
    weight = pack(random_weight("Q4_0", 16, 64, seed=1))
    x = torch.zeros(2, 64)
    x[1] = 1e-42
    assert torch.equal(product(x, weight), torch.zeros(2, 16))


def test_parts_of_several_formats_are_merged(kernels: Library) -> None:
    shapes = {"Q4_K": 32, "Q5_0": 39, "Q2_K": 5, "Q6_K": 16}
    parts = [random_weight(name, rows, 256, seed=rows) for name, rows in shapes.items()]
    x = torch.randn(12, 300, generator=torch.Generator().manual_seed(1))[:, 20:276]
    y = product(x, *[pack(part) for part in parts])
    each = [product(x, pack(part)) for part in parts]
    assert torch.equal(y, torch.cat(each, dim=1))


@pytest.mark.parametrize("first", [1024, 1040])
def test_results_that_are_larger_than_the_caches(kernels: Library, first: int) -> None:
    """Whole lines, written past the caches, and panels that begin in the middle of one."""
    parts = [
        pack(random_weight("Q8_0", outputs, 64, seed=outputs)) for outputs in (first, 2080 - first)
    ]
    x = torch.randn(520, 64, generator=torch.Generator().manual_seed(1)).float()
    if kernels.level.name != "amx":  # which rounds activations of few rows only
        x = x.bfloat16()
    few = torch.cat([product(part, *parts) for part in x.split(40)])
    assert torch.equal(product(x, *parts), few)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packed_weights_take_little_more_than_the_blocks(kernels: Library, name: str) -> None:
    weight = random_weight(name, 64, 1024, seed=1)
    assert pack(weight).data.numel() <= 1.05 * weight.blocks.numel()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_extreme_values_do_not_overflow(kernels: Library, name: str) -> None:
    """All bits of the weights set, or none, and activations at their greatest of either sign."""
    for byte in (0, 255):
        weight = random_weight(name, 16, 512, seed=1)
        _, size = GGML_QUANT_SIZES[weight.type]
        blocks = weight.blocks.reshape(-1, size)
        scales = {*HALVES[name], *(at + 1 for at in HALVES[name])}
        values = [at for at in range(size) if at not in scales]
        if name == "MXFP4":
            values.remove(0)
        blocks[:, values] = byte
        weight = QuantisedTensor(weight.type, weight.shape, blocks.view(16, -1))
        dense = weight.dequantise(torch.float32).double()
        for sign in (1, -1):
            x = torch.full((9, 512), float(sign))
            for rows in (1, 9):
                torch.testing.assert_close(
                    product(x[:rows], pack(weight)).double(),
                    x[:rows].double() @ dense.T,
                    rtol=1e-5,
                    atol=1e-2,
                )


def test_other_formats_and_shapes_are_not_served(kernels: Library) -> None:
    assert quantised.serves("Q4_K", 512)
    assert not quantised.serves("IQ3_S", 512)
    assert not quantised.serves("Q4_K", 384)
    assert quantised.serves("Q8_0", 96)


def test_experts_with_incomplete_panels(kernels: Library) -> None:
    parts = [
        [
            pack(random_weight("Q5_1", 9, 96, seed=expert)),
            pack(random_weight("Q8_0", 9, 96, seed=9)),
        ]
        for expert in range(3)
    ]
    x = torch.randn(14, 96, generator=torch.Generator().manual_seed(1))
    y = quantised.linear(x, quantised.Matrices(parts), torch.tensor([2, 0, 12]))
    assert torch.equal(y, torch.cat([product(x[:2], *parts[0]), product(x[2:], *parts[2])]))
