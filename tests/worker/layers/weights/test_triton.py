"""Products of the Triton kernels with quantised weights, and of one row with plain ones, in
Triton's interpreter on the CPU. `make triton` installs the package and runs this."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import gpu
from worker.layers import expert_linears
from worker.layers.expert_linears import ExpertFactory, GroupedLinears
from worker.layers.linear import LinearFactory
from worker.layers.weights import storage, triton
from worker.layers.weights.dense import DenseWeight
from worker.layers.weights.quantise import quantise
from worker.layers.weights.quantised_tensor import QuantisedTensor, Weight
from worker.layers.weights.storage import ProductKind, reencode
from worker.layers.weights.triton import TritonStack, TritonWeight

KINDS = [Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.MXFP4]
SCALES = {Type.Q4_0: (0,), Type.Q5_0: (0,), Type.Q8_0: (0,), Type.Q6_K: (208,)}  # else at 0 and 2
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs the package triton: make triton"
)


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    gpu.usable.cache_clear()
    yield
    gpu.usable.cache_clear()


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Read when the kernels are defined, by the first import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


def quantised(kind: Type, rows: int, columns: int, seed: int = 0) -> QuantisedTensor:
    """Random bits, with scales between 2^-8 and 2^-6."""
    values, size = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    if kind is Type.MXFP4:
        blocks[..., 0] = random.integers(119, 122, blocks.shape[:2])
        return QuantisedTensor(kind, (rows, columns), torch.from_numpy(blocks.reshape(rows, -1)))
    for at in SCALES.get(kind, (0, 2)):
        scale = random.uniform(2**-8, 2**-6, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    return QuantisedTensor(kind, (rows, columns), torch.from_numpy(blocks.reshape(rows, -1)))


def values(tensor: QuantisedTensor) -> Tensor:
    """By gguf."""
    return torch.from_numpy(quants.dequantize(tensor.blocks.numpy(), tensor.type))


@needs_triton
@pytest.mark.parametrize("rows", [1, 3, 16, 17])
@pytest.mark.parametrize("shape", [(16, 256), (70, 512), (5, 768)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_product_equals_that_of_gguf_s_values(
    kind: Type, shape: tuple[int, int], rows: int
) -> None:
    """They are not rounded in it, as long as it has few rows and is not of float32."""
    tensor = quantised(kind, *shape)
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).half()
    assert triton.kernels().multiplies(x)
    expected = F.linear(x.float(), values(tensor))
    y = TritonWeight([tensor])(x, None).float()
    most = float(expected.abs().max())
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-5 * most)


@needs_triton
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_float32_and_many_rows_are_multiplied_by_torch(kind: Type) -> None:
    tensor = quantised(kind, 33, 512)
    for rows, dtype in ((1, torch.float32), (40, torch.float32), (40, torch.float16)):
        x = torch.randn(rows, 512).to(dtype)
        assert not triton.kernels().multiplies(x)
        assert torch.equal(TritonWeight([tensor])(x, None), x @ values(tensor).to(dtype).T)


@needs_triton
@pytest.mark.parametrize("columns", [32, 96, 288])
@pytest.mark.parametrize(
    "kind", [Type.Q4_0, Type.Q5_0, Type.Q8_0, Type.MXFP4], ids=lambda kind: kind.name
)
def test_rows_may_end_within_a_step(kind: Type, columns: int) -> None:
    tensor = quantised(kind, 20, columns)
    for rows in (2, 40):
        x = torch.randn(rows, columns).half()
        expected = F.linear(x.float(), values(tensor))
        y = TritonWeight([tensor])(x, None).float()
        most = float(expected.abs().max())
        torch.testing.assert_close(y, expected, rtol=2e-3, atol=most / 500)


@needs_triton
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantised_values_are_gguf_s(kind: Type) -> None:
    tensor = quantised(kind, 19, 512)
    kernels = triton.kernels()
    planes = kernels.pack(kind.name, tensor.blocks)
    assert torch.equal(kernels.dequantise(planes, 0, 19, torch.float32), values(tensor))
    assert torch.equal(kernels.dequantise(planes, 7, 12, torch.float32), values(tensor)[7:12])


@needs_triton
# The interpreter has no product in bf16.
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.float16, 2), (torch.float16, 70), (torch.bfloat16, 70)]
)
def test_merged_parts_with_a_bias_in_the_layer_s_dtype(
    dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "LARGE_PRODUCT_VALUES", 256 * 7)
    parts = [quantised(Type.Q4_K, 24, 256), quantised(Type.Q6_K, 9, 256, seed=1)]
    x, bias = torch.randn(rows, 512).to(dtype)[:, ::2], torch.randn(33).to(dtype)
    weight = torch.cat([values(part).to(dtype) for part in parts])
    expected = F.linear(x, weight, bias).float()
    y = TritonWeight(parts)(x, bias)
    assert y.dtype is dtype
    most = float(expected.abs().max())
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=most / 100)


@needs_triton
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    weight = TritonWeight([quantised(Type.Q5_K, 40, 512)])
    x = torch.randn(8, 512).half()
    together = weight(x, None)
    x[1:] *= 100
    assert torch.equal(weight(x, None)[0], together[0])
    assert torch.equal(weight(x[:1], None)[0], together[0])


def stacked(
    kinds: list[Type], rows: int, columns: int, experts: int, device: str = "cpu"
) -> tuple[TritonStack, Tensor]:
    """The weights of some experts, each merged from a tensor of each type, and their values
    [experts, outputs, columns]."""
    merged = [
        [
            quantised(kind, rows + part, columns, 10 * expert + part)
            for part, kind in enumerate(kinds)
        ]
        for expert in range(experts)
    ]
    stack = TritonStack(experts, merged[0], torch.device(device))
    for expert in (*range(1, experts), 0):
        stack.put(expert, merged[expert])
    return stack, torch.stack([torch.cat([*map(values, parts)]) for parts in merged])


def of_their_experts(x: Tensor, weights: Tensor, counts: list[int]) -> Tensor:
    """Each row of x by the weight of its expert."""
    pieces = zip(x.split(counts), weights, strict=True)
    return torch.cat([F.linear(some, weight) for some, weight in pieces])


# The rows of five experts: of chunks with a single row, of several chunks, and in whole chunks.
COUNTS = [[1, 0, 0, 0, 1], [3, 0, 20, 1, 0], [0, 0, 40, 0, 0], [8, 0, 8, 8, 8], [0, 1, 0, 0, 79]]


@needs_triton
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_product_of_experts_equals_that_of_gguf_s_values(kind: Type, counts: list[int]) -> None:
    stack, exact = stacked([kind], 70, 256, len(counts))
    x = torch.randn(sum(counts), 256, generator=torch.Generator().manual_seed(1)).half()
    assert triton.kernels().multiplies_grouped(x, len(counts))
    expected = of_their_experts(x.float(), exact, counts)
    y = stack(x, torch.tensor(counts)).float()
    most = float(expected.abs().max())
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=2e-5 * most)


@needs_triton
@pytest.mark.parametrize("rows", [12, 90])
def test_experts_whose_merged_tensors_have_several_types(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And rows that end within a step, of slices; many rows by weights in pieces."""
    monkeypatch.setattr(triton, "LARGE_PRODUCT_VALUES", 16 * 4 * 288)
    kinds = [Type.Q5_0, Type.Q5_0, Type.Q8_0, Type.Q4_0]
    stack, exact = stacked(kinds, 20, 288, 4)
    counts = [0, rows // 3, 1, rows - rows // 3 - 1]
    x = torch.randn(rows, 576).half()[:, ::2]
    assert triton.kernels().multiplies_grouped(x, 4) == (rows == 12)
    expected = of_their_experts(x.float(), exact, counts)
    y = stack(x, torch.tensor(counts))
    assert y.dtype is torch.float16
    most = float(expected.abs().max())
    torch.testing.assert_close(y.float(), expected, rtol=2e-3, atol=most / 500)


@needs_triton
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_experts_are_multiplied_by_torch_in_float32_and_with_many_rows(kind: Type) -> None:
    stack, exact = stacked([kind], 32, 256, 2)
    for counts, dtype in (([1, 0], torch.float32), ([30, 3], torch.float16)):
        x = torch.randn(sum(counts), 256).to(dtype)
        assert not triton.kernels().multiplies_grouped(x, 2)
        expected = of_their_experts(x, exact.to(dtype), counts)
        near = 1e-5 if dtype is torch.float32 else 2e-3
        y = stack(x, torch.tensor(counts))
        torch.testing.assert_close(y, expected, rtol=near, atol=near * float(expected.abs().max()))


@needs_triton
def test_rows_of_all_experts_are_dequantised_together() -> None:
    stack, exact = stacked([Type.Q6_K], 19, 512, 3)
    _, planes = stack._runs[0]
    found = triton.kernels().dequantise(planes, 7, 12, torch.float32, 3)
    assert torch.equal(found.view(3, 5, 512), exact[:, 7:12])


@needs_triton
def test_a_row_does_not_depend_on_those_of_other_experts() -> None:
    stack, _ = stacked([Type.Q5_K], 40, 512, 4)
    x = torch.randn(8, 512).half()
    together = stack(x, torch.tensor([2, 0, 5, 1]))
    x[3:] *= -2
    assert torch.equal(stack(x, torch.tensor([2, 0, 2, 4]))[:3], together[:3])
    assert torch.equal(stack(x[:2], torch.tensor([2, 0, 0, 0])), together[:2])


@needs_triton
@pytest.mark.parametrize("quantised_at_load", [False, True])
def test_the_slots_of_experts_on_gpus(
    quantised_at_load: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up in types of their own, of which one has no planes; plain ones stay so, unless
    they are quantised while they are loaded."""

    def kernels(kind: Type, *others: object) -> ProductKind | None:
        return ProductKind.TRITON if triton.multiplies(kind) else None

    monkeypatch.setattr(expert_linears, "runs_grouped", lambda device: True)
    monkeypatch.setattr(storage, "_kernels", kernels)
    count, columns, rows = 3, 256, 24
    compress = (lambda tensor: quantise(tensor, Type.Q8_0)) if quantised_at_load else None
    linears = LinearFactory(torch.float16, torch.device("cpu"), compress)
    experts = ExpertFactory(count, linears).column(columns, rows, rows, rows, bias=True)
    assert isinstance(experts, GroupedLinears)
    exact = torch.empty(count, 3 * rows, columns)
    biases = torch.randn(count, 3 * rows).half()
    random = torch.Generator().manual_seed(0)
    for expert in range(count):
        served = quantised(Type.Q4_K, rows, columns, expert)
        unserved = quantised(Type.IQ4_NL, rows, columns, expert)
        plain = torch.randn(rows, columns, generator=random).half()
        parts: list[Weight] = [served, unserved, plain]
        for part, weight in enumerate(parts):
            slot = experts.weight_slot(expert, part)
            assert slot.quantised and slot.shape == (rows, columns)
            slot.fill(weight)
            own = slice(part * rows, (part + 1) * rows)
            experts.bias_slot(expert, part).fill(biases[expert, own])
        third = values(quantise(plain, Type.Q8_0)) if quantised_at_load else plain.float()
        exact[expert] = torch.cat([values(served), values(reencode(unserved)), third])
    for counts in ([2, 0, 5], [20, 30, 1]):
        x = torch.randn(sum(counts), columns, generator=random).half()
        added = biases.float().repeat_interleave(torch.tensor(counts), dim=0)
        expected = of_their_experts(x.float(), exact, counts) + added
        y = experts(x, torch.tensor(counts)).float()
        torch.testing.assert_close(y, expected, rtol=4e-3, atol=float(expected.abs().max()) / 500)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 5), (4, 1024), (33, 2050)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_by_a_plain_weight(
    biased: bool, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "serves", lambda x: True)
    weight, x = torch.randn(shape).to(dtype), torch.randn(1, 2 * shape[1]).to(dtype)[:, ::2]
    bias = torch.randn(shape[0]).to(dtype) if biased else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    y = DenseWeight(weight)(x, bias)
    assert y.dtype is dtype and y.shape == (1, shape[0])
    near = 1e-3 if dtype is torch.float16 else 1e-2
    torch.testing.assert_close(y.double(), expected, rtol=near, atol=1e-4)


@needs_triton
def test_more_rows_and_float32_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "serves", lambda x: True)
    asked: list[torch.dtype] = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append(x.dtype)
        return F.linear(x, weight, bias)

    monkeypatch.setattr(gpu.dense(), "product", product)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weight = torch.randn(6, 16).to(dtype)
        for rows in (1, 2):
            DenseWeight(weight)(torch.randn(rows, 16).to(dtype), None)
        DenseWeight(weight[:, ::2])(torch.randn(1, 8).to(dtype), None)
    assert asked == [torch.float16, torch.bfloat16]


@needs_triton
def test_the_kernels_serve_these_types_on_gpus() -> None:
    assert all(map(triton.multiplies, KINDS))
    assert not triton.multiplies(Type.Q2_K)


def test_without_triton_one_log_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(gpu, "import_module", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not triton.multiplies(Type.Q8_0)
    assert [record.message for record in caplog.records] == [
        "on GPUs torch computes alone, because triton can't be imported (No module named "
        "'triton'): steps take several times as long, and each product dequantises its weight first"
    ]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler.\nPlease specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "cuda_utils.c"]),  # there is no Python.h
        ImportError("cuda_utils.so: failed to map segment from shared object"),
        PermissionError(13, "Permission denied", "/.triton"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_triton_that_can_not_start_kernels_leaves_all_to_torch(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Driver:
        @property
        def active(self) -> Any:
            raise error

    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    broken = SimpleNamespace(knobs=knobs, runtime=SimpleNamespace(driver=Driver()))
    monkeypatch.setattr(gpu, "import_module", {"triton": broken}.__getitem__)
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not gpu.serves(on_gpu) and not triton.multiplies(Type.Q8_0)
    (record,) = caplog.records
    cause = " ".join(str(error).split())
    assert f"because Triton can't start kernels ({cause}): " in record.message
    assert "apt-get install gcc python3-dev" in record.message


@needs_triton
@pytest.mark.parametrize("compiler", [None, "false"])
def test_triton_without_a_compiler_is_found_before_the_first_step(
    compiler: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The package itself, as on a machine with a GPU."""
    from triton.backends.nvidia import driver
    from triton.runtime import driver as drivers

    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver.CudaDriver, "is_active", staticmethod(lambda: True))
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(drivers, "_active", None)
    monkeypatch.setattr(drivers, "_default", None)
    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setenv("CC", compiler)
    assert not gpu.usable()
    (record,) = caplog.records
    cause = "Failed to find C compiler" if compiler is None else "Command '['false', "
    assert f"because Triton can't start kernels ({cause}" in record.message


@needs_triton
def test_the_kernels_fit_in_the_shared_memory_of_cards(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    del environment["TRITON_INTERPRET"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.layers.weights.compile_triton"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 4 * (3 * len(KINDS) + 1)
    assert [line for line in lines if int(line[4]) > int(line[5])] == []
    assert all(int(size) > 1000 for _, _, _, size, _, _ in lines)
