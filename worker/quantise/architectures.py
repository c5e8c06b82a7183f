"""Families whose models can be written as GGUF files: the metadata that describes them, and what
changes in the values of their tensors.

llama.cpp fixes by architecture what a config.json could say otherwise. A model with other values
there is refused, because llama.cpp would answer differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES
from torch import Tensor

from jobs.errors import JobError
from worker.layers.mlp import ACTIVATIONS
from worker.layers.rope import RopeConfig
from worker.layers.self_attention import HeadShape
from worker.loading.config import ModelConfig
from worker.models import gemma3, mistral, qwen2, qwen3, qwen3_moe
from worker.models.fields import Fields
from worker.models.llama import LlamaConfig
from worker.models.mixture import ExpertsConfig
from worker.models.pre_norm import PreNormConfig, one_window, windows_from_layer

Keys = dict[str, Any]  # metadata, without the architecture's prefix
FREQUENCIES = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """`keys` describes a config. `permuted`: rows of queries and keys are stored in pairs of
    neighbours. `norm_offset` is added to the weights of norms."""

    number: MODEL_ARCH
    keys: Callable[[Fields], Keys]
    permuted: bool = False
    norm_offset: float = 0.0

    @property
    def name(self) -> str:
        return MODEL_ARCH_NAMES[self.number]


@dataclass(frozen=True)
class Description:
    """What a file says of its model."""

    architecture: Architecture
    keys: Keys
    attention: HeadShape
    rope_factors: Tensor | None  # the frequencies are divided by these

    @property
    def experts(self) -> int:
        return int(self.keys.get("expert_count", 0))


def describe(config: ModelConfig) -> Description:
    """Raises JobError for a model that has no form in GGUF files."""
    if config.model_type not in ARCHITECTURES:
        raise JobError(
            "unsupported_model",
            f"models of the family {config.model_type} cannot be quantised; supported: "
            f"{', '.join(ARCHITECTURES)}",
        )
    architecture = ARCHITECTURES[config.model_type]
    keys = architecture.keys(config.fields)
    rope, attention = keys.pop("rope"), keys.pop("attention")
    return Description(architecture, keys | _rope_keys(rope), attention, _rope_factors(rope))


def _llama(fields: Fields) -> Keys:
    config = LlamaConfig.read(fields)
    _require(fields, "hidden_act", "silu")
    return _common(
        fields, config.hidden_size, config.attention, config.intermediate_size, config.rope
    )


def _mistral(fields: Fields) -> Keys:
    fields = Fields({**mistral.DEFAULTS, **fields.values}, fields.where)
    return _pre_norm(fields, PreNormConfig.read(fields, one_window(fields)))


def _qwen2(fields: Fields) -> Keys:
    fields = fields.with_defaults(qwen2.DEFAULTS)
    return _pre_norm(fields, PreNormConfig.read(fields, windows_from_layer(fields)))


def _qwen3(fields: Fields) -> Keys:
    fields = fields.with_defaults(qwen3.DEFAULTS)
    _without_biases(fields)
    return _pre_norm(fields, PreNormConfig.read(fields, windows_from_layer(fields)))


def _qwen3_moe(fields: Fields) -> Keys:
    fields = fields.with_defaults(qwen3_moe.DEFAULTS)
    fields = fields.with_defaults({"shared_expert_intermediate_size": 0})
    _without_biases(fields)
    config = PreNormConfig.read(fields, windows_from_layer(fields))
    mixture = ExpertsConfig.read(fields)
    if not mixture.norm_topk_prob or not all(mixture.sparse):
        raise _refused(fields, "norm_topk_prob is false, or not all of its layers have experts")
    return _pre_norm(fields, config) | {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.num_experts_per_tok,
        "expert_feed_forward_length": mixture.moe_intermediate_size,
    }


def _gemma3(fields: Fields) -> Keys:
    config = gemma3.Gemma3Config.read(fields)
    fields = fields.with_defaults(gemma3.DEFAULTS)
    _without_biases(fields)
    _require(fields, "hidden_activation", "gelu_pytorch_tanh")
    dim, layers = config.attention.dim, len(config.layer_kinds)
    largest = layers == 62  # its scores have another scale in llama.cpp
    scale = config.hidden_size // config.attention.heads if largest else dim
    if config.query_pre_attn_scalar != scale:
        raise _refused(fields, f"query_pre_attn_scalar is not {scale}")
    keys = _common(
        fields,
        config.hidden_size,
        config.attention,
        config.intermediate_size,
        config.ropes[gemma3.FULL],
    )
    keys["attention.sliding_window"] = config.sliding_window
    keys["attention.sliding_window_pattern"] = [
        kind == gemma3.SLIDING for kind in config.layer_kinds
    ]
    keys["rope.freq_base_swa"] = float(config.ropes[gemma3.SLIDING].theta)
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return keys


ARCHITECTURES: dict[str, Architecture] = {
    "gemma3": Architecture(MODEL_ARCH.GEMMA3, _gemma3, norm_offset=1.0),
    "gemma3_text": Architecture(MODEL_ARCH.GEMMA3, _gemma3, norm_offset=1.0),
    "llama": Architecture(MODEL_ARCH.LLAMA, _llama, permuted=True),
    "mistral": Architecture(MODEL_ARCH.LLAMA, _mistral, permuted=True),
    "qwen2": Architecture(MODEL_ARCH.QWEN2, _qwen2),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, _qwen3),
    "qwen3_moe": Architecture(MODEL_ARCH.QWEN3MOE, _qwen3_moe),
}


def _pre_norm(fields: Fields, config: PreNormConfig) -> Keys:
    _require(fields, "hidden_act", "silu")
    windows = [window for window in config.windows if window is not None]
    if windows and min(windows) < config.rope.context:
        raise _refused(fields, "its layers attend within a sliding window")
    return _common(
        fields, config.hidden_size, config.attention, config.intermediate_size, config.rope
    )


def _common(
    fields: Fields, hidden: int, attention: HeadShape, inner: int, rope: RopeConfig
) -> Keys:
    return {
        "attention": attention,
        "rope": rope,
        "block_count": fields.layers(),
        "context_length": rope.max_positions,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.dim,
        "attention.value_length": attention.dim,
        "attention.layer_norm_rms_epsilon": float(
            fields.number("rms_norm_eps", 1e-6, or_zero=True)
        ),
    }


def _rope_keys(rope: RopeConfig) -> Keys:
    keys: Keys = {"rope.dimension_count": rope.dim, "rope.freq_base": float(rope.theta)}
    scaling = rope.scaling
    if rope.kind in ("dynamic", "longrope"):
        raise JobError(
            "unsupported_model",
            f"RoPE of the type {rope.kind} cannot be stored in a GGUF file; supported: default, "
            "linear, llama3, yarn",
        )
    if rope.kind in ("linear", "yarn"):
        factor = scaling.get("factor") or rope.max_positions / rope.original
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(factor)}
    if rope.kind == "yarn":
        keys["rope.scaling.original_context_length"] = rope.original
        keys["rope.scaling.yarn_beta_fast"] = float(scaling.get("beta_fast") or 32.0)
        keys["rope.scaling.yarn_beta_slow"] = float(scaling.get("beta_slow") or 1.0)
        if {"attention_factor", "mscale", "mscale_all_dim"} & scaling.keys():
            raise JobError(
                "unsupported_model",
                "RoPE of the type yarn with an attention_factor or mscale of its own cannot be "
                "stored in a GGUF file",
            )
    return keys


def _rope_factors(rope: RopeConfig) -> Tensor | None:
    """llama3's scaling: what the frequency of each pair of channels is divided by."""
    if rope.kind != "llama3":
        return None
    scaling = rope.scaling
    low, high, factor = (
        float(scaling[name]) for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    turns = rope.original / (2 * math.pi * rope.theta**exponents)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - keep) / factor + keep)).float()


def _require(fields: Fields, name: str, value: str) -> None:
    given = fields.text(name, value)
    if ACTIVATIONS.get(given) is not ACTIVATIONS[value]:
        raise _refused(fields, f"{name} is {given!r}, not {value!r}")


def _without_biases(fields: Fields) -> None:
    if fields.boolean("attention_bias", False):
        raise _refused(fields, "attention_bias is true")


def _refused(fields: Fields, fact: str) -> JobError:
    return fields.error(f"{fact}, which GGUF files of this architecture cannot state")
