"""Quantised tensors: their values against gguf's own, and their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from worker.layers.weights import quantised_tensor
from worker.layers.weights.quantised_tensor import QuantisedTensor

Type = GGMLQuantizationType
PLAIN = {"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"}
UNSUPPORTED = {"Q8_1", "Q8_K", "Q1_0"}  # gguf doesn't dequantise these
TYPES = [kind for kind in Type if kind.name not in PLAIN | UNSUPPORTED]


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> torch.Tensor:
    values, size = GGML_QUANT_SIZES[kind]
    bits = np.random.default_rng(0).integers(0, 256, (rows, columns // values * size), np.uint8)
    return torch.from_numpy(bits)


def random_tensor(kind: GGMLQuantizationType, *shape: int) -> QuantisedTensor:
    *stack, columns = shape
    blocks = random_blocks(kind, int(np.prod(stack)), columns)
    return QuantisedTensor(kind, shape, blocks.view(*stack, -1))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_values_are_bit_for_bit_those_of_gguf(
    kind: GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over random bytes, which include infinite and NaN scales."""
    # Rows end between two chunks.
    monkeypatch.setattr(quantised_tensor, "DEQUANTISE_VALUES", 1 << 12)
    tensor = random_tensor(kind, 96, 1024)
    values = tensor.dequantise(torch.float32)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(tensor.blocks.numpy(), kind)
    assert tuple(values.shape) == (96, 1024)
    same = values.numpy().view(np.int32) == expected.view(np.int32)
    assert (same | np.isnan(expected)).all()
    assert (torch.isnan(values).numpy() == np.isnan(expected)).all()
    assert np.isfinite(expected).mean() > 0.5


def test_values_are_rounded_to_the_dtype_once() -> None:
    tensor = random_tensor(Type.Q4_K, 4, 512)
    expected = tensor.dequantise(torch.float32).to(torch.bfloat16)
    torch.testing.assert_close(
        tensor.dequantise(torch.bfloat16), expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("offset", [1, 2, 7])
def test_blocks_may_begin_at_any_byte(offset: int) -> None:
    """As in a mapped file."""
    stored = random_tensor(Type.Q6_K, 1, 256)
    memory = torch.zeros(offset + stored.blocks.numel(), dtype=torch.uint8)
    memory[offset:] = stored.blocks.flatten()
    moved = QuantisedTensor(Type.Q6_K, (1, 256), memory[offset:].view(1, -1))
    torch.testing.assert_close(
        moved.dequantise(torch.float32), stored.dequantise(torch.float32), equal_nan=True
    )


@pytest.mark.parametrize(
    "index",
    [3, slice(2, 5), torch.tensor([4, 0, 0])],
    ids=["one", "slice", "order"],
)
@pytest.mark.parametrize("shape", [(6, 64), (6, 5, 64)], ids=["rows", "experts"])
def test_an_index_takes_rows_or_experts(
    index: int | slice | torch.Tensor, shape: tuple[int, ...]
) -> None:
    tensor = random_tensor(Type.Q8_0, *shape)
    part = tensor[index]
    expected = tensor.dequantise(torch.float32)[index]
    assert part.shape == expected.shape
    torch.testing.assert_close(
        part.dequantise(torch.float32), expected, rtol=0, atol=0, equal_nan=True
    )


def test_a_slice_shares_memory_with_the_whole() -> None:
    tensor = random_tensor(Type.Q4_0, 8, 64)
    assert tensor[2:4].blocks.data_ptr() == tensor.blocks[2:].data_ptr()
