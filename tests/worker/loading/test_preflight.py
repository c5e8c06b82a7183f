"""The checks before weights are read: sizes, memory, and what can't be loaded."""

from __future__ import annotations

import dataclasses
import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors.torch import load_file

from jobs import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.folders import WEIGHTS, edit_json, edit_weights
from tests.worker.gguf.blocks import make_type_file
from tests.worker.sources import open_folder
from worker import device as devices
from worker.checkpoint.headers import Checkpoint
from worker.device import Device
from worker.gguf.write.model import quantise_model
from worker.kernels import library, planes
from worker.layers.weights import triton
from worker.layers.weights.storage import ProductKind
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.preflight import Preflight, preflight
from worker.model_spec import ModelSpec

CPU = torch.device("cpu")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in original.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def check(
    folder: Path,
    dtype: str = "fp32",
    device: torch.device = CPU,
    quantize: str | None = None,
) -> Preflight:
    source = open_folder(folder)
    with source.weights() as headers:
        return preflight(
            describe(source),
            ModelSpec(reference=str(folder), dtype=dtype, quantize=quantize),
            Device(device),
            headers,
        )


def test_sizes_are_those_of_the_weight_files(original: Path) -> None:
    checked = check(original)
    tensors = load_file(original / WEIGHTS)
    assert checked.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert checked.weight_bytes == 4 * checked.parameters
    assert checked.context_length == 512


@pytest.mark.parametrize(
    ("dtype", "name", "size"), [("auto", "float32", 4), ("bf16", "bfloat16", 2)]
)
def test_the_dtype_decides_the_bytes(original: Path, dtype: str, name: str, size: int) -> None:
    checked = check(original, dtype)
    assert checked.dtype_name == name
    assert checked.weight_bytes == size * checked.parameters


def test_experts_that_are_quantised_at_load_count_so_on_a_gpu_too(tmp_path: Path) -> None:
    folder = make_checkpoint(
        tmp_path / "model", "qwen3_moe", hidden_size=64, moe_intermediate_size=32, num_experts=4
    )
    plain = check(folder, "bf16", torch.device("meta"))
    found = [check(folder, "bf16", device, "q8") for device in (CPU, torch.device("meta"))]
    assert found[0].weight_bytes == found[1].weight_bytes
    experts = 3 * 3 * 4 * 64 * 32  # layers, projections, experts
    assert plain.weight_bytes - found[1].weight_bytes >= experts * 2 - experts // 32 * 34


def test_a_gpu_holds_a_quantised_mixture_in_planes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the experts too: as many bytes as their blocks, but for K types and columns that fill no
    step."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    made = make_checkpoint(tmp_path / "it", "qwen3_moe", moe_intermediate_size=288, **sizes)
    file = tmp_path / "it.gguf"
    written = quantise_model(open_folder(made), "Q4_K_M", file, lambda done, total: None)
    monkeypatch.setattr(triton, "multiplies", lambda kind: kind.name in planes.FORMATS)
    monkeypatch.setattr(devices, "free_bytes", lambda device: 2**33)
    source = find(str(written.path))
    spec = ModelSpec(reference=str(file), dtype="bf16")
    with source.weights() as headers:
        checked = preflight(describe(source), spec, Device(torch.device("cuda")), headers)
    expected, kinds = 0, set()
    for tensor in GGUFReader(file).tensors:
        columns, *rows = map(int, tensor.shape)
        kind = tensor.tensor_type
        if kind.name == "F32":
            expected += 2 * int(tensor.n_elements)
        elif tensor.name == "token_embd.weight":
            expected += int(tensor.n_bytes)
        else:
            kinds.add((kind.name, len(rows)))
            expected += planes.bytes_of(kind.name, prod(rows), columns)
    assert {("Q4_K", 2), ("Q4_K", 1)} <= kinds
    assert any(matrix == 2 and name != "Q4_K" for name, matrix in kinds), kinds
    assert checked.weight_bytes == expected
    assert {one.product for one in checked.products} == {ProductKind.TRITON}


@pytest.mark.parametrize("columns", [256, 288, 512])
@pytest.mark.parametrize("name", planes.FORMATS)
def test_the_bytes_of_planes(name: str, columns: int) -> None:
    if columns % planes.FORMATS[name].values:
        pytest.skip("rows of whole blocks")
    made = planes.empty(name, 3, columns, CPU)
    stored = (made.low, made.high, made.scales, made.supers)
    assert planes.bytes_of(name, 3, columns) == sum(plane.nbytes for plane in stored)


def test_a_tied_head_that_kernels_pack_counts_beside_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library.active() is None:
        pytest.skip("this machine has no kernels")
    folder = make_checkpoint(tmp_path / "model", "llama", tie_word_embeddings=True)
    with_kernels = check(folder, "bf16", CPU, "q8")
    monkeypatch.setattr(library, "active", lambda: None)
    shared = check(folder, "bf16", CPU, "q8")
    table = load_file(folder / WEIGHTS)["model.embed_tokens.weight"].numel()
    assert with_kernels.tied
    assert with_kernels.weight_bytes - shared.weight_bytes == table // 32 * 34


def check_tied_on_a_gpu(folder: Path, kind: GGMLQuantizationType) -> Preflight:
    """Of a file whose matrices have this type, with a tied head."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    made = make_checkpoint(folder / "tied", "llama", tie_word_embeddings=True, **sizes)
    file = make_type_file(made, folder / "it.gguf", kind)
    source = find(str(file))
    with source.weights() as headers:
        return preflight(
            describe(source),
            ModelSpec(reference=str(file), dtype="bf16"),
            Device(torch.device("cuda")),
            headers,
        )


def test_a_tied_head_that_triton_multiplies_counts_beside_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "free_bytes", lambda device: 2**33)
    found = []
    for served in (True, False):
        monkeypatch.setattr(triton, "multiplies", lambda kind, served=served: served)
        (tmp_path / str(served)).mkdir()
        found.append(check_tied_on_a_gpu(tmp_path / str(served), GGMLQuantizationType.Q8_0))
    packed, shared = found
    assert packed.weight_bytes - shared.weight_bytes == packed.vocab_size * 256 // 32 * 34


def test_a_tied_head_whose_table_a_gpu_dequantises_is_not_reencoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "multiplies", lambda kind: kind.name == "Q8_0")
    monkeypatch.setattr(devices, "free_bytes", lambda device: 2**33)
    checked = check_tied_on_a_gpu(tmp_path, GGMLQuantizationType.IQ3_S)
    table, *others = sorted(checked.products, key=lambda one: one.matrices)
    assert table.product is ProductKind.PLAIN and table.matrices == 1
    assert [one.product for one in others] == [ProductKind.REENCODED]


def test_no_weight_is_read(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)
    assert check(original).parameters


def test_weights_that_do_not_fit_are_refused_with_the_sizes(original: Path) -> None:
    checked = check(original)
    enough = dataclasses.replace(checked, free_bytes=checked.weight_bytes)
    assert enough.obstacle is None
    enough.require_room()
    large = dataclasses.replace(checked, weight_bytes=2**33, free_bytes=3 * 2**30)
    with pytest.raises(JobError) as caught:
        large.require_room()
    assert caught.value.code == "out_of_memory"
    assert caught.value.message == (
        f"{original} needs 8.0 GiB for its weights in float32 and cpu has 3.0 GiB free: use a "
        "smaller model, another dtype or another device"
    )


def test_the_longest_sequence_is_what_the_cache_beside_the_weights_holds(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = check(original).weight_bytes
    longest = []
    for room in (-1, 0, 30_000, 60_000, 2**40):
        monkeypatch.setattr(devices, "free_bytes", lambda _, room=room: weights + room)
        longest.append(check(original).longest)
    assert longest[:2] == [0, 0]
    assert 0 < longest[2] < longest[3] < 512
    assert longest[4] == 512


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(JobError, match=r"model\.norm\.weight") as caught:
        check(folder)
    assert caught.value.code == "unsupported_model"


def test_a_wrapped_text_model_is_refused_by_the_name_of_its_wrapper(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    text = {**config, "hidden_size": 7}
    wrapper = {"model_type": "llava", "architectures": ["Llava"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(wrapper))
    with pytest.raises(JobError) as caught:
        check(folder)
    assert caught.value.code == "unsupported_model"
    assert caught.value.message.startswith(
        f"unsupported model_type 'llava' in {folder}: its text model ('qwen3') can't be read on "
        "its own ("
    )


def test_sizes_whose_product_overflows_are_one_sentence(folder: Path) -> None:
    edit_json(folder / "config.json", lambda values: values.update(intermediate_size=2**62))
    with pytest.raises(JobError) as caught:
        check(folder)
    assert caught.value.code == "unsupported_model"
    assert "\n" not in caught.value.message
