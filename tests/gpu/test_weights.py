"""Quantised weights on the device: products of every type against gguf's values, whole files, and
quantisation at load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch.nn import functional as F

from jobs.api.sampling import Sampling
from tests.gpu.conftest import DEVICE, Load, distance
from tests.worker.layers.weights.test_triton import (
    COUNTS,
    KINDS,
    of_their_experts,
    quantised,
    stacked,
    values,
)
from worker.gguf.write.model import quantise_model
from worker.gguf.write.recipe import KINDS as KINDS_OF_FILES
from worker.layers.weights import triton
from worker.layers.weights.dense import DenseWeight
from worker.layers.weights.dequantise import FUNCTIONS, dequantise
from worker.layers.weights.linear_weight import LinearWeight
from worker.layers.weights.quantise import quantise
from worker.layers.weights.triton import TritonWeight
from worker.loading.find import find

needs_cuda = pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="runs compiled kernels")
# Of a product's length: a row of the result has 512 or more products of numbers that are rounded
# to the dtype, and float32 sums.
NEAR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@needs_cuda
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_of_the_compiled_kernels(kind: Type, dtype: torch.dtype) -> None:
    """With tails of rows, outputs and columns, of slices, and of two merged parts."""
    for outputs, columns in ((33, 512), (256, 1024), (5, 768)):
        parts = [quantised(kind, outputs, columns), quantised(kind, 20, columns, seed=1)]
        weight = TritonWeight([part.to(torch.device(DEVICE)) for part in parts])
        exact = torch.cat([values(part) for part in parts])
        for rows in (1, 3, 16, 32, 33, 300):
            x = torch.randn(rows, 2 * columns).to(dtype)[:, ::2]
            bias = torch.randn(len(exact)).to(dtype)
            expected = F.linear(x.double(), exact.to(dtype).double(), bias.double())
            found = weight(x.to(DEVICE), bias.to(DEVICE))
            assert found.dtype is dtype
            assert distance(found.cpu().double(), expected) < NEAR[dtype], (outputs, rows)


@needs_cuda
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_of_the_compiled_kernels_are_gguf_s(kind: Type) -> None:
    tensor = quantised(kind, 19, 512)
    kernels = triton.kernels()
    planes = kernels.pack(kind.name, tensor.blocks.to(DEVICE))
    assert torch.equal(kernels.dequantise(planes, 0, 19, torch.float32).cpu(), values(tensor))


@needs_cuda
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    weight = TritonWeight([quantised(Type.Q5_K, 40, 512).to(torch.device(DEVICE))])
    x = torch.randn(8, 512, dtype=torch.bfloat16, device=DEVICE)
    together = weight(x, None)
    x[1:] *= 100
    assert torch.equal(weight(x, None)[0], together[0])
    assert torch.equal(weight(x[:1], None)[0], together[0])


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (33, 2050), (4096, 1024), (1024, 3072)], ids=str)
def test_one_row_by_a_plain_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(1, 2 * shape[1]).to(dtype)[:, ::2]
    expected = F.linear(x.double(), weight.double(), bias.double())
    found = DenseWeight(weight.to(DEVICE))(x.to(DEVICE), bias.to(DEVICE))
    assert found.dtype is dtype
    assert distance(found.cpu().double(), expected) < NEAR[dtype]


@needs_cuda
@pytest.mark.parametrize("rows", [1, 9])
def test_products_in_a_cuda_graph(rows: int) -> None:
    """The sums of several programs are added in each replay anew."""
    blocks = [quantised(kind, 96, 1024) for kind in (Type.Q4_K, Type.Q6_K)]
    weights: list[LinearWeight] = [TritonWeight([one.to(torch.device(DEVICE)) for one in blocks])]
    weights.append(DenseWeight(torch.randn(96, 1024, dtype=torch.bfloat16, device=DEVICE)))
    x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device=DEVICE)
    for weight in weights:
        weight(x, None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [weight(x, None) for weight in weights]
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        for weight, product in zip(weights, found, strict=True):
            assert torch.equal(product, weight(x, None))


@needs_cuda
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_products_of_experts(kind: Type, dtype: torch.dtype) -> None:
    """By the kernel in bf16 and fp16 up to 80 rows of five experts, else by torch."""
    for outputs, columns in ((33, 512), (256, 1024), (5, 768)):
        stack, exact = stacked([kind, kind], outputs, columns, 5, DEVICE)
        for counts in (*COUNTS, [100, 0, 3, 1, 200]):
            x = torch.randn(sum(counts), 2 * columns).to(dtype)[:, ::2]
            expected = of_their_experts(x.double(), exact.to(dtype).double(), counts)
            found = stack(x.to(DEVICE), torch.tensor(counts, device=DEVICE))
            assert found.dtype is dtype
            assert distance(found.cpu().double(), expected) < NEAR[dtype], (outputs, counts)


@needs_cuda
def test_products_of_many_experts() -> None:
    """As of Qwen3-30B-A3B: gate Q4_K and up Q6_K, of 128 experts."""
    stack, exact = stacked([Type.Q4_K, Type.Q6_K], 64, 2048, 128, DEVICE)
    for rows in (8, 128, 512, 1024, 2048, 5000):
        chosen = torch.randint(0, 128, (rows,)).bincount(minlength=128)
        x = torch.randn(rows, 2048).bfloat16()
        expected = of_their_experts(x.double(), exact.double(), chosen.tolist())
        found = stack(x.to(DEVICE), chosen.to(DEVICE)).cpu().double()
        assert distance(found, expected) < NEAR[torch.bfloat16], rows


@needs_cuda
def test_products_of_experts_in_a_cuda_graph() -> None:
    """Each replay reads the numbers of rows anew, and nothing waits for the device."""
    stack, _ = stacked([Type.Q4_K, Type.Q6_K], 96, 1024, 5, DEVICE)
    x = torch.zeros(24, 1024, dtype=torch.bfloat16, device=DEVICE)
    counts = torch.tensor([24, 0, 0, 0, 0], device=DEVICE)
    stack(x, counts)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = stack(x, counts)
    for own in ([3, 0, 20, 1, 0], [5, 5, 5, 5, 4], [0, 0, 0, 0, 24]):
        counts.copy_(torch.tensor(own))
        x.normal_()
        graph.replay()
        assert torch.equal(found, stack(x, counts))


@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.name)
def test_values_by_torch_operations_are_gguf_s(kind: Type) -> None:
    per_block, size = GGML_QUANT_SIZES[kind]
    blocks = torch.randint(0, 256, (64, size), dtype=torch.uint8)
    found = dequantise(blocks.to(DEVICE), kind).cpu()
    with np.errstate(all="ignore"):  # some random scales are infinite or NaN
        expected = torch.from_numpy(quants.dequantize(blocks.numpy(), kind)).view(-1, per_block)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


# All rows consist of whole blocks of 256 values.
WIDE = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
}
# The kernels multiply with all tensors of these files.
AS_THEY_ARE = (
    "F16",
    "BF16",
    "Q8_0",
    "Q4_0",
    "Q5_0",
    "Q4_K_M",
    "Q4_K_S",
    "Q5_K_M",
    "Q5_K_S",
    "Q6_K",
)
FILES = tuple(KINDS_OF_FILES)


@pytest.mark.parametrize("keep", [False, True], ids=["re-encoded", "kept"])
@pytest.mark.parametrize("kind", FILES)
def test_gguf_files(
    kind: str, keep: bool, checkpoint: Callable[..., Path], load: Load, tmp_path: Path
) -> None:
    """Logits of prompts and of decode. Re-encoded blocks are rounded once more, to 8 bits."""
    source = find(str(checkpoint("qwen3", **WIDE)))
    file = quantise_model(source, kind, tmp_path / "file.gguf", lambda done, total: None).path
    ours, theirs = load(file, keep_quantised=keep), load(file, reference=True)
    prompt = [5 + i % 90 for i in range(40)]
    expected = theirs.prompt_logits(prompt)
    near = 1e-4 if keep or kind in AS_THEY_ARE else 0.03
    assert distance(ours.prompt_logits(prompt), expected) < near


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 256},
    "gpt_oss": {"swiglu_limit": 7.0},
}
ALL_EXPERTS = {"num_experts_per_tok": 4}  # else rounding could change the choice


@pytest.fixture(params=MIXTURES)
def mixture(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], tmp_path: Path
) -> Callable[..., Path]:
    """Writes a GGUF file of a mixture."""

    def mixture(kind: str, **fields: Any) -> Path:
        made = checkpoint(request.param, **WIDE, **MIXTURES[request.param], **fields)
        out = tmp_path / f"{kind}.gguf"
        return quantise_model(find(str(made)), kind, out, lambda done, total: None).path

    return mixture


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q5_0", "Q5_1"])
def test_experts_of_a_gguf_file(kind: str, mixture: Callable[..., Path], load: Load) -> None:
    """In planes, in re-encoded ones, and in blocks that are kept as they are."""
    file = mixture(kind, **({} if kind in AS_THEY_ARE else ALL_EXPERTS))
    prompt = [5 + i % 90 for i in range(40)]
    expected = load(file, reference=True, keep_quantised=True).prompt_logits(prompt)
    kept = load(file, keep_quantised=True)
    assert distance(kept.prompt_logits(prompt), expected) < 1e-4
    near = 1e-4 if kind in AS_THEY_ARE else 0.03
    assert distance(load(file).prompt_logits(prompt), expected) < near


def test_experts_in_bf16(mixture: Callable[..., Path], load: Load) -> None:
    """Of many rows by torch, and of few by the kernel: rounding errors like those of the CPU."""
    file = mixture("Q4_K_M", **ALL_EXPERTS)
    exact, rounded = (
        load(file, reference=True, keep_quantised=True, dtype=dtype) for dtype in ("fp32", "bf16")
    )
    ours = load(file, dtype="bf16")
    for length in (40, 9):
        prompt = [5 + i % 90 for i in range(length)]
        expected = exact.prompt_logits(prompt)
        near = 2 * distance(rounded.prompt_logits(prompt), expected)
        assert distance(ours.prompt_logits(prompt), expected) < near


def test_decode_steps_of_quantised_experts_are_graphs(
    mixture: Callable[..., Path], load: Load
) -> None:
    """With the tokens of steps whose kernels are started one by one. Graphs have as many rows."""
    file = mixture("Q4_K_M")
    prompts = [[5 + i] * (3 + 5 * i) for i in range(8)]
    options = Sampling(temperature=0, ignore_eos=True, max_tokens=24)
    found = []
    for graphs in (False, True):
        engine = load(file, dtype="bf16", max_batch=len(prompts))
        model: Any = engine._core.runner.model
        model._graphs.enabled = graphs
        found.append([one.token_ids for one in engine.generate(prompts, options)])
        if graphs and DEVICE.startswith("cuda"):
            assert model._graphs.enabled and model._graphs._graphs
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_quantised_at_load(dtype: str, checkpoint: Callable[..., Path], load: Load) -> None:
    path, prompt = checkpoint("qwen3", **WIDE), [5 + i % 90 for i in range(40)]
    theirs = load(path, reference=True, quantize="q8").prompt_logits(prompt)
    ours = load(path, dtype=dtype, quantize="q8")
    near = 1e-4 if dtype == "fp32" else 0.05
    assert distance(ours.prompt_logits(prompt), theirs) < near
    # Of few rows, in bf16 by the kernels that unpack within the product.
    assert distance(ours.prompt_logits(prompt[:9]), theirs[:9]) < near


def test_blocks_are_quantised_on_the_cpu_from_values_of_the_device() -> None:
    x = torch.randn(8, 256)
    assert torch.equal(
        quantise(x.to(DEVICE), Type.Q8_0).blocks.cpu(), quantise(x, Type.Q8_0).blocks
    )
