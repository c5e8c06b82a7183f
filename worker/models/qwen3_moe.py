"""Qwen3-MoE (Qwen3 technical report, 2025): Qwen3 with sparse layers among dense ones."""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.layers.rope import Rope
from worker.layers.self_attention import SelfAttention
from worker.models.fields import Fields
from worker.models.mixture import ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Placement, PreNormLayer
from worker.models.qwen3_config import Qwen3Config

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
    config, mixture = Qwen3Config.read(fields), ExpertsConfig.read(fields)
    linears, norm = place.linears, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)
    hidden = config.hidden_size

    def layer(index: int, window: int | None) -> PreNormLayer:
        mlp: FeedForward = (
            mixture.sparse_mlp(hidden, place)
            if mixture.sparse[index]
            else GatedMLP(hidden, config.intermediate_size, linears, act=config.hidden_act)
        )
        return PreNormLayer(
            input_norm=norm(hidden),
            mixer=SelfAttention(
                hidden, config.attention, linears, bias=config.attention_bias, norm=norm
            ),
            post_norm=norm(hidden),
            mlp=mlp,
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention, window),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer(index, window) for index, window in enumerate(config.windows)],
        norm=norm(hidden),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )


QWEN3_MOE = Family(qwen3_moe)
