"""Qwen1.5-MoE and Qwen2-MoE (Qwen2 technical report, 2024): Qwen2 with sparse layers, each with a
shared expert, among dense ones."""

from __future__ import annotations

from typing import Any

from worker.layers.mlp import GatedMLP
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import FULL, SLIDING, Fields
from worker.models.mixture import ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, Windows, pre_norm, windows_by_kind

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
}


def read_windows(fields: Fields) -> Windows:
    """With use_sliding_window, every other layer before max_window_layers slides."""
    layers = fields.layers()
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    last = fields.integer("max_window_layers", 28, minimum=0)
    plan = [SLIDING if i % 2 == 0 and i < last else FULL for i in range(layers)]
    return windows_by_kind(fields, plan)


def qwen2_moe(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen2-MoE with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    config, mixture = PreNormConfig.read(fields, read_windows(fields)), ExpertsConfig.read(fields)
    hidden, bias = config.hidden_size, fields.boolean("qkv_bias", True)

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(hidden, config.attention, place.linears, bias=bias, out_bias=False)

    def make_mlp(index: int) -> FeedForward:
        if mixture.sparse[index]:
            return mixture.sparse_mlp(hidden, place)
        return GatedMLP(hidden, config.intermediate_size, place.linears, act=config.hidden_act)

    return pre_norm(config, tied, place, make_mixer=make_mixer, make_mlp=make_mlp)


QWEN2_MOE = Family(qwen2_moe)
