"""Qwen3-MoE (Qwen3 technical report, 2025): Qwen3 with sparse layers among dense ones."""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import Fields
from worker.models.mixture import ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, pre_norm, windows_from_layer

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS = {
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


def qwen3_moe(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3-MoE with empty weights."""
    # With use_sliding_window all layers slide. The family has neither layer_types nor a shared
    # expert.
    fixed = {"layer_types": None, "max_window_layers": 0, "shared_expert_intermediate_size": 0}
    fields = Fields({**DEFAULTS, **fields.values, **fixed}, fields.where)
    config = PreNormConfig.read(fields, windows_from_layer(fields))
    mixture = ExpertsConfig.read(fields)
    hidden = config.hidden_size

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(
            hidden,
            config.attention,
            place.linears,
            bias=config.attention_bias,
            norm=place.norm(config.rms_norm_eps),
        )

    def make_mlp(index: int) -> FeedForward:
        if mixture.sparse[index]:
            return mixture.sparse_mlp(hidden, place)
        return GatedMLP(hidden, config.intermediate_size, place.linears, act=config.hidden_act)

    return pre_norm(config, tied, place, make_mixer=make_mixer, make_mlp=make_mlp)


QWEN3_MOE = Family(qwen3_moe)
