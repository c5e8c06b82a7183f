"""Fields that a config.json omits have the same defaults as in transformers."""

from __future__ import annotations

import json
import re
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.errors import JobError
from tests.worker.checkpoints import FAMILIES, make_checkpoint
from worker import Engine
from worker.checkpoint.config import read_config
from worker.models import registry
from worker.models.model import Placement

# Fields that determine shapes of weights. Fields that must match each other are omitted together.
SIZES = [
    {"vocab_size"},
    {"hidden_size"},
    {"intermediate_size"},
    {"num_hidden_layers", "layer_types", "no_rope_layers"},
    {"layer_types"},
    {"num_attention_heads", "num_key_value_heads"},
    {"head_dim"},
    {"num_experts", "num_local_experts", "num_experts_per_tok"},
    {"moe_intermediate_size"},
    {"shared_expert_intermediate_size"},
    {"linear_num_key_heads", "linear_num_value_heads"},
    {"linear_key_head_dim"},
    {"linear_value_head_dim"},
    {"linear_conv_kernel_dim"},
    {"tie_word_embeddings"},
]
KEPT = {"model_type", "architectures", "dtype", "eos_token_id", "pad_token_id"}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


def test_omitted_sizes(folder: Path, tmp_path: Path) -> None:
    transformers: Any = import_module("transformers")
    config = json.loads((folder / "config.json").read_text())
    seen = 0
    for names in SIZES:
        fewer = {name: value for name, value in config.items() if name not in names}
        if len(fewer) == len(config):
            continue
        (tmp_path / "config.json").write_text(json.dumps(fewer))
        try:
            ours = parameters(tmp_path)
        except JobError as error:  # no default: every published file has the field
            assert re.search("field '[a-z_]+' is missing", error.message), error
            continue
        with torch.device("meta"):
            reference = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(tmp_path)
            )
        assert ours == sum(prod(p.shape) for p in reference.parameters()), names
        seen += 1
    assert seen >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_an_omitted_number_of_key_value_heads(family: str, tmp_path: Path) -> None:
    """The default may exceed the number of attention heads of a small model."""
    transformers: Any = import_module("transformers")
    folder = make_checkpoint(tmp_path, family, num_attention_heads=32, num_key_value_heads=1)
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    assert parameters(folder) == sum(prod(p.shape) for p in reference.parameters())


def parameters(folder: Path) -> int:
    config = read_config(folder, "it", registry.FAMILIES)
    place = Placement(torch.float32, torch.device("meta"))
    model = registry.FAMILIES[config.model_type](config.fields, config.tied, place)
    return sum(prod(slot.shape) for slot in model.weight_map().values())


def test_omitted_constants(folder: Path, tmp_path: Path) -> None:
    """All together: eps of the norms, RoPE, activation, router, window, score scale."""
    transformers: Any = import_module("transformers")
    config = json.loads((folder / "config.json").read_text())
    kept = set().union(*SIZES, KEPT) - {"no_rope_layers"}
    fewer = {name: value for name, value in config.items() if name in kept}
    assert len(fewer) < len(config) - 5
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(fewer))
    # Small, so that eps is visible beside the mean square.
    tensors = {
        name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors["model.embed_tokens.weight"] *= 3e-3
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    prompt = torch.randint(400, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    ours = Engine.load(str(tmp_path), device="cpu", dtype="fp32").prompt_logits(prompt)
    assert float((ours - expected).abs().max() / expected.abs().max()) < 2e-4
