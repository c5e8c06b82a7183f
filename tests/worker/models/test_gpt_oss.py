"""The published configuration of gpt-oss, and its clamped gate."""

from __future__ import annotations

from importlib import import_module
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.checkpoint.quantization import Mxfp4, read_quantization
from worker.layers.mlp import clamped
from worker.models.config_fields import Fields
from worker.models.model import Placement
from worker.models.registry import FAMILIES

# config.json of openai/gpt-oss-20b.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 201088,
}


def build(**changes: Any) -> Any:
    place = Placement(torch.bfloat16, torch.device("meta"))
    fields = Fields({**GPT_OSS_20B, **changes}, "config.json")
    return FAMILIES["gpt_oss"](fields, False, place)


def test_the_published_config_gives_the_published_model() -> None:
    transformers: Any = import_module("transformers")
    model = build()
    assert model.context_length == 131_072
    assert [cache.window for cache in model.make_caches()] == [128, None] * 12
    assert isinstance(read_quantization(Fields(GPT_OSS_20B, "config.json")), Mxfp4)
    slots = model.weight_map()
    with torch.device("meta"):
        reference = transformers.GptOssForCausalLM(transformers.GptOssConfig(**GPT_OSS_20B))
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    stored = {
        slot.stacked.name if slot.stacked else name: slot.stacked.shape
        if slot.stacked
        else slot.shape
        for name, slot in slots.items()
    }
    assert stored == shapes
    assert sum(prod(slot.shape) for slot in slots.values()) == 20_914_757_184  # the model card's


def test_rotary_frequencies_are_those_of_transformers() -> None:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    place = Placement(torch.float32, torch.device("cpu"))
    small = {"num_hidden_layers": 2, "layer_types": None, "num_local_experts": 4, "vocab_size": 8}
    small |= {"hidden_size": 32, "intermediate_size": 32}
    fields = Fields({**GPT_OSS_20B, **small}, "config.json")
    rope = FAMILIES["gpt_oss"](fields, False, place)._layers[0].rope  # type: ignore[attr-defined]
    positions = torch.tensor([0, 1, 17, 4095, 4096, 100_000])
    rotation = rope(positions, torch.ones_like(positions))
    reference: Any = GptOssRotaryEmbedding(GptOssConfig(**GPT_OSS_20B))
    cos, sin = reference(torch.zeros(1, dtype=torch.float32), positions[None])
    assert torch.equal(rotation.cos[:, 0, :32], cos[0])
    assert torch.equal(rotation.sin[:, 0, 32:], sin[0])


@pytest.mark.parametrize("scale", [1.0, 20.0])
def test_the_gate_is_clamped_as_in_transformers(scale: float) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both = scale * torch.randn(50, 16, generator=torch.Generator().manual_seed(1))
    layer: Any = SimpleNamespace(alpha=1.702, limit=7.0)
    expected = GptOssExperts._apply_gate(layer, both)
    ours = clamped(1.702, 7.0)(both[:, ::2], both[:, 1::2])
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("absent", [{}, {"rope_scaling": None}])
def test_an_omitted_stretch_is_that_of_the_published_model(absent: dict[str, Any]) -> None:
    given = {name: value for name, value in GPT_OSS_20B.items() if name != "rope_scaling"}
    place = Placement(torch.float32, torch.device("meta"))
    model = FAMILIES["gpt_oss"](Fields({**given, **absent}, "config.json"), False, place)
    assert model.stretched and model.context_length == 131_072
