"""FP8 checkpoints load as the dense checkpoints that they dequantise to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from torch import Tensor

from jobs.cli import build
from tests.worker.checkpoints import make_checkpoint
from tests.worker.folders import WEIGHTS, edit_json, edit_weights, logits, refusal
from tests.worker.ranks.threads import prompt_logits
from worker import Engine

FP8, MAX = torch.float8_e4m3fn, 448.0
BLOCK = (24, 20)  # divides none of the shapes
Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]  # weight → FP8 values, scale


class Stored(NamedTuple):
    """An FP8 checkpoint, and the dense one with the same values."""

    quantised: Path
    dense: Path


def blockwise(weight: Tensor) -> tuple[Tensor, Tensor]:
    high, wide = BLOCK
    values, scales = torch.empty_like(weight, dtype=FP8), []
    for row in range(0, weight.shape[0], high):
        scales.append([])
        for column in range(0, weight.shape[1], wide):
            part = slice(row, row + high), slice(column, column + wide)
            scale = (weight[part].abs().max() / MAX).item()
            values[part] = (weight[part] / scale).to(FP8)
            scales[-1].append(scale)
    return values, torch.tensor(scales)


def per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / MAX
    return (weight / scale).to(FP8), scale


def per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    scale = weight.abs().max().reshape(1) / MAX
    return (weight / scale).to(FP8), scale


def undo(values: Tensor, scale: Tensor) -> Tensor:
    """The definition, element by element."""
    if scale.shape in ((1,), (values.shape[0], 1)):
        return values.float() * scale
    rows, columns = (torch.arange(size) for size in values.shape)
    return values.float() * scale[rows[:, None] // BLOCK[0], columns // BLOCK[1]]


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"weights": {"type": "float", "num_bits": 8, "symmetric": True, **weights}}
    form = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
    }
    return {**form, "config_groups": {"group_0": group}}


FINE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
SCHEMES: dict[str, tuple[Quantise, str, dict[str, Any]]] = {
    "fine-grained": (blockwise, "_scale_inv", {**FINE, "weight_block_size": list(BLOCK)}),
    "fp8 per tensor": (per_tensor, "_scale", FINE),
    "channel": (per_channel, "_scale", compressed(strategy="channel")),
    "tensor": (per_tensor, "_scale", compressed(strategy="tensor")),
    "block": (
        blockwise,
        "_scale",
        compressed(strategy="block", block_structure=list(BLOCK)),
    ),
}


def store(folder: Path, family: str, scheme: str) -> Stored:
    quantise, suffix, config = SCHEMES[scheme]
    dense = make_checkpoint(folder / "dense", family)
    quantised = Path(shutil.copytree(dense, folder / "quantised"))
    plain = load_file(dense / WEIGHTS)
    stored = dict(plain)
    for name, weight in plain.items():
        if "_proj" not in name:
            continue
        parts = [quantise(part) for part in (weight if weight.dim() == 3 else [weight])]
        values, scale = torch.stack([one for one, _ in parts]), torch.stack([s for _, s in parts])
        exact = torch.stack([undo(*part) for part in parts])
        if weight.dim() == 2:
            values, scale, exact = values[0], scale[0], exact[0]
            stored[name.replace(".weight", ".input_scale")] = torch.ones(1)
        stored |= {name: values, name + suffix: scale}
        plain[name] = exact
    save_file(plain, dense / WEIGHTS)
    save_file(stored, quantised / WEIGHTS)
    edit_json(quantised / "config.json", lambda values: values.update(quantization_config=config))
    return Stored(quantised, dense)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return store(tmp_path, "qwen3", "fine-grained")


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        *(("qwen3", scheme) for scheme in SCHEMES),
        *(("qwen3_moe", scheme) for scheme in ("fine-grained", "channel")),
        *(("qwen3_5_moe_text", scheme) for scheme in ("fine-grained", "channel")),  # stacked
    ],
)
def test_the_logits_are_those_of_the_dequantised_model(
    tmp_path: Path, family: str, scheme: str
) -> None:
    quantised, dense = store(tmp_path, family, scheme)
    assert torch.equal(logits(quantised), logits(dense))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_moe_text"])
def test_ranks_split_the_values(tmp_path: Path, family: str) -> None:
    quantised, dense = store(tmp_path, family, "fine-grained")
    assert torch.equal(prompt_logits(quantised, 2), prompt_logits(dense, 2))


def test_it_runs_in_bf16_by_default(stored: Stored, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        engine = Engine.load(str(stored.quantised), device="cpu")
    assert engine.info.dtype == "bfloat16"
    assert f"{stored.quantised}: 21 FP8 tensors are dequantised while they are" in caplog.text
    dense = Engine.load(str(stored.dense), device="cpu", dtype="bf16")
    assert torch.equal(engine.prompt_logits([5, 6]), dense.prompt_logits([5, 6]))


def test_the_check_says_that_weights_are_dequantised(stored: Stored) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(build(), words)

    done = run("models", "check", str(stored.quantised))
    assert done.exit_code == 0, done.stderr
    assert "in bfloat16, dequantised from FP8" in done.stdout
    assert (
        json.loads(run("models", "check", str(stored.quantised), "--json").stdout)[
            "dequantised_from"
        ]
        == "fp8"
    )


NAME = "model.layers.0.self_attn.q_proj.weight"


def test_a_weight_without_a_scale_is_refused(stored: Stored) -> None:
    edit_weights(stored.quantised, lambda tensors: tensors.pop(f"{NAME}_scale_inv"))
    assert f"tensor {NAME} is stored as F8_E4M3 without a scale" in refusal(stored.quantised)


def test_a_scale_of_another_shape_is_refused(stored: Stored) -> None:
    wrong = {f"{NAME}_scale_inv": torch.ones(5, 5)}
    edit_weights(stored.quantised, lambda tensors: tensors.update(wrong))
    message = refusal(stored.quantised)
    assert f"its scale {NAME}_scale_inv as F32 [5, 5] doesn't fit" in message


def test_a_vector_in_blocks_is_refused(stored: Stored) -> None:
    name = "model.norm.weight"
    vector = {name: torch.ones(32).to(FP8), f"{name}_scale_inv": torch.ones(1)}
    edit_weights(stored.quantised, lambda tensors: tensors.update(vector))
    assert f"its scale {name}_scale_inv as F32 [1] doesn't fit" in refusal(stored.quantised)


def test_fp8_weights_without_a_config_are_refused(stored: Stored) -> None:
    edit_json(stored.quantised / "config.json", lambda values: values.pop("quantization_config"))
    message = refusal(stored.quantised)
    assert "stores 21 of its 78 tensors as F8_E4M3" in message
    assert "its config.json has no quantization_config for them" in message


def test_a_scale_that_is_not_a_number_is_named(stored: Stored) -> None:
    bad = {f"{NAME}_scale_inv": torch.full((3, 2), float("nan"))}
    edit_weights(stored.quantised, lambda tensors: tensors.update(bad))
    engine = Engine.load(str(stored.quantised), device="cpu")
    error = engine._core.loaded.not_finite(3)
    assert f"tensor {NAME}_scale_inv in" in error.message
