"""Products with bf16 weights equal exact products of the same numbers, at every shape and level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.kernels import dense
from worker.kernels.dense import Way
from worker.kernels.library import Library
from worker.layers.weights.bf16 import Bf16Weight

examples = settings(max_examples=60)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


WAYS = [Way(pairs, few) for pairs in (True, False) for few in (5, 24, dense.UNLIMITED)]


def product(
    x: Tensor, weights: list[Tensor], rows: list[int] | None = None, way: Way | None = None
) -> Tensor:
    counts = None if rows is None else torch.tensor(rows)
    return dense.linear(x, dense.Matrices(weights, way), counts)


def assert_product(y: Tensor, x: Tensor, weight: Tensor) -> None:
    exact = x.double() @ weight.double().T
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5 * x.shape[1])


@examples
@given(
    rows=st.lists(st.integers(0, 37) | st.sampled_from([48, 49, 64, 100]), min_size=1, max_size=4),
    outputs=st.integers(32, 150),
    steps=st.integers(1, 9),
    seed=st.integers(0, 1000),
    way=st.sampled_from(WAYS),
)
def test_products(
    kernels: Library, rows: list[int], outputs: int, steps: int, seed: int, way: Way
) -> None:
    """The rows of one or more matrices, each beside those of the others."""
    columns = 32 * steps
    weights = [random(seed + i, outputs, columns) for i in range(len(rows))]
    x = random(seed, sum(rows), columns)
    y = product(x, weights, rows, way)
    for weight, part, result in zip(weights, x.split(rows), y.split(rows), strict=True):
        assert_product(result, part, weight)


@pytest.mark.parametrize("way", WAYS)
def test_no_rows(kernels: Library, way: Way) -> None:
    weight = random(2, 70, 96)
    assert product(random(1, 0, 96), [weight], way=way).shape == (0, 70)
    x = random(1, 30, 96)
    assert_product(product(x, [weight, weight, weight], [0, 30, 0], way), x, weight)


def test_many_rows_of_a_layer(kernels: Library) -> None:
    x, weight = random(1, 2 * 256 + 7, 96), random(2, 70, 96)
    assert_product(Bf16Weight(weight)(x, None), x, weight)


@pytest.mark.parametrize("way", [Way(pairs=False, few=24), Way(pairs=True, few=5)])
@pytest.mark.parametrize("outputs", [2080, 2090])
def test_results_that_are_larger_than_the_caches(kernels: Library, outputs: int, way: Way) -> None:
    """In whole lines, which are written past the caches, or not."""
    x, weights = random(1, 520, 64), [random(2, outputs, 64), random(3, outputs, 64)]
    y = product(x, weights, [417, 103], way)
    for weight, part, result in zip(weights, x.split([417, 103]), y.split([417, 103]), strict=True):
        assert_product(result, part, weight)


@pytest.mark.parametrize("rows", range(2, 6))
def test_few_rows_have_the_bits_that_each_has_alone(kernels: Library, rows: int) -> None:
    """A token and its verified drafts are such rows."""
    assert_rows_have_the_bits_that_each_has_alone(rows, 320)


@pytest.mark.parametrize("rows", [6, 13, 24])
@pytest.mark.parametrize("columns", [320, 1056])
def test_rows_in_float32_have_the_bits_that_each_has_alone(
    kernels: Library, rows: int, columns: int
) -> None:
    if kernels.level.name == "amx":
        pytest.skip("the matrix unit multiplies these rows")
    way = Way(pairs=False, few=24)
    assert_rows_have_the_bits_that_each_has_alone(rows, columns, way)


def assert_rows_have_the_bits_that_each_has_alone(
    rows: int, columns: int, way: Way | None = None
) -> None:
    x, weight = random(1, rows, columns), random(2, 70, columns)
    alone = [product(row[None], [weight], way=way) for row in x]
    assert torch.equal(product(x, [weight], way=way), torch.cat(alone))


@pytest.mark.parametrize("rows", [1, 3, 16, 33])
def test_rows_with_a_distance(kernels: Library, rows: int) -> None:
    x, weight = random(1, rows, 256)[:, 64:192], random(2, 70, 128)
    assert not x.is_contiguous() or rows == 1
    assert_product(product(x, [weight]), x, weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [4, 16, 17])
def test_a_spoiled_row_does_not_affect_others(kernels: Library, rows: int, value: float) -> None:
    x, weight = random(1, rows, 96), random(2, 50, 96)
    clean = product(x, [weight])
    x[rows - 2, 5] = value
    spoiled = product(x, [weight])
    assert not spoiled[rows - 2].isfinite().any()
    kept = [row for row in range(rows) if row != rows - 2]
    assert torch.equal(spoiled[kept], clean[kept])


def test_threads_do_not_change_results(kernels: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    way = dense.fastest_way()  # which is measured for each number
    monkeypatch.setattr(dense, "fastest_way", lambda: way)
    x, weight = random(1, 19, 320), random(2, 1000, 320)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(product(x, [weight]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_shapes_that_are_left_to_torch(kernels: Library) -> None:
    assert dense.serves(32, 32)
    assert not dense.serves(31, 32)
    assert not dense.serves(32, 48)
