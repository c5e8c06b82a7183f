"""MXFP4 checkpoints of gpt-oss load as the dense checkpoints that they dequantise to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from torch import Tensor

from jobs.cli import build
from tests.worker.checkpoints import make_checkpoint
from tests.worker.folders import WEIGHTS, edit_json, edit_weights, logits, refusal
from tests.worker.ranks.threads import prompt_logits
from worker import Engine
from worker.checkpoint.quantization import Mxfp4
from worker.gguf.write.model import quantise_model
from worker.layers.weights.quantised_tensor import QuantisedTensor
from worker.loading.find import find

# The field in openai/gpt-oss-20b.
CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
PROJECTIONS = ("experts.gate_up_proj", "experts.down_proj")
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def reference(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """transformers' dequantisation: [experts, rows, groups, 16] → [experts, 32 * groups, rows]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dense: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    return dense


def random_blocks(shape: tuple[int, ...], low: int, high: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(low, high, shape, generator=random, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("low", "high"), [(110, 130), (0, 253)])
def test_values_are_those_of_transformers(low: int, high: int, dtype: torch.dtype) -> None:
    blocks, scales = random_blocks((3, 10, 4), low, high, seed=low)
    expected = reference(blocks, scales, dtype)
    for index in range(3):
        ours = Mxfp4().dequantise(blocks[index], scales[index])
        assert torch.equal(ours.to(dtype), expected[index])


class Stored(NamedTuple):
    """An MXFP4 checkpoint, and the dense one with the same values."""

    quantised: Path
    dense: Path


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    dense = make_checkpoint(tmp_path / "dense", "gpt_oss", intermediate_size=64)
    quantised = Path(shutil.copytree(dense, tmp_path / "quantised"))
    plain = load_file(dense / WEIGHTS)
    packed = dict(plain)
    for seed, (name, weight) in enumerate(plain.items()):
        if not name.endswith(PROJECTIONS):
            continue
        experts, columns, rows = weight.shape
        blocks, scales = random_blocks((experts, rows, columns // 32), 122, 127, seed)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = reference(blocks, scales)
    save_file(plain, dense / WEIGHTS, metadata={"format": "pt"})
    save_file(packed, quantised / WEIGHTS, metadata={"format": "pt"})
    edit_json(quantised / "config.json", lambda values: values.update(quantization_config=CONFIG))
    return Stored(quantised, dense)


def test_the_logits_are_those_of_the_dequantised_model(stored: Stored) -> None:
    from transformers import AutoModelForCausalLM

    ours = logits(stored.quantised)
    assert torch.equal(ours, logits(stored.dense))
    model: Any = AutoModelForCausalLM.from_pretrained(stored.dense, attn_implementation="eager")
    prompt = list(range(5, 45))
    engine = Engine.load(str(stored.quantised), device="cpu", dtype="fp32")
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    assert (engine.prompt_logits(prompt) - expected).abs().max() < 2e-4 * expected.abs().max()


def test_ranks_split_the_values(stored: Stored) -> None:
    assert torch.equal(prompt_logits(stored.quantised, 2), prompt_logits(stored.dense, 2))


def test_the_log_and_the_check_say_that_weights_are_dequantised(
    stored: Stored, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        Engine.load(str(stored.quantised), device="cpu")
    assert f"{stored.quantised}: 6 MXFP4 tensors are dequantised while they are" in caplog.text
    checked = CliRunner().invoke(build(), ["models", "check", str(stored.quantised), "--json"])
    assert json.loads(checked.stdout)["dequantised_from"] == "mxfp4"


@pytest.mark.parametrize(("kind", "experts"), [("Q8_0", "MXFP4"), ("F16", "F16")])
def test_a_quantised_file_keeps_the_experts(
    kind: str, experts: str, stored: Stored, tmp_path: Path
) -> None:
    """Bit for bit, also in memory. RoPE is configured as GGUF files have it: other bounds of yarn
    give other logits."""
    file = tmp_path / "it.gguf"
    config = stored.quantised / "config.json"
    edit_json(config, lambda values: values.update(swiglu_limit=7.0))
    edit_json(config, lambda values: values["rope_parameters"].update(truncate=True))
    quantise_model(find(str(stored.quantised)), kind, file, lambda done, total: None)
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert {types[f"blk.0.ffn_{part}_exps.weight"] for part in ("gate", "up", "down")} == {experts}
    assert types["blk.0.ffn_gate_exps.bias"] == "F32"
    dense = load_file(stored.dense / WEIGHTS)
    with find(str(file)).weights() as checkpoint:
        for part, rows in (("gate", slice(0, None, 2)), ("up", slice(1, None, 2))):
            for expert in range(4):
                name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
                weight = checkpoint.read(name)
                if isinstance(weight, QuantisedTensor):
                    weight = weight.dequantise(torch.float32)
                assert torch.equal(weight.float(), dense[NAME][expert].T[rows])
    engine = Engine.load(str(file), device="cpu", dtype="fp32")
    assert ("MXFP4" in engine.info.dtype) == (kind == "Q8_0")
    if kind == "F16":
        expected = logits(stored.quantised)
        assert (logits(file) - expected).norm() < 0.01 * expected.norm()


def test_blocks_without_scales_are_refused(stored: Stored) -> None:
    edit_weights(stored.quantised, lambda tensors: tensors.pop(f"{NAME}_scales"))
    message = refusal(stored.quantised)
    assert f"tensor {NAME}_blocks is stored as U8 without a scale" in message


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(4, 128, 2, dtype=torch.uint8),
        torch.zeros(4, 128, 1, dtype=torch.float32),
    ],
)
def test_scales_that_do_not_fit_are_refused(stored: Stored, wrong: Tensor) -> None:
    edit_weights(stored.quantised, lambda tensors: tensors.update({f"{NAME}_scales": wrong}))
    assert f"its scale {NAME}_scales as" in refusal(stored.quantised)


def test_blocks_of_another_size_are_refused(stored: Stored) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{NAME}_blocks"] = tensors[f"{NAME}_blocks"][:, :-2].contiguous()
        tensors[f"{NAME}_scales"] = tensors[f"{NAME}_scales"][:, :-2].contiguous()

    edit_weights(stored.quantised, change)
    message = refusal(stored.quantised)
    assert f"tensor {NAME}_blocks dequantises to [4, 32, 126], its config.json requires" in message


def test_blocks_without_a_config_are_refused(stored: Stored) -> None:
    edit_json(stored.quantised / "config.json", lambda values: values.pop("quantization_config"))
    assert "its config.json has no quantization_config for them" in refusal(stored.quantised)
