"""Gemma 3, text model (Gemma 3 technical report, 2025).

Zero-centred norms before and after attention and MLP, embeddings scaled by sqrt(hidden), sliding
layers with their own RoPE theta between global ones, attention scores scaled by
query_pre_attn_scalar^-0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.layers.mlp import ACTIVATIONS, Activation, GatedMLP
from worker.layers.rope import Rope, RopeConfig
from worker.layers.self_attention import HeadShape, SelfAttention
from worker.models.config_fields import (
    FULL,
    SLIDING,
    Fields,
    read_head_shape,
    read_layer_kinds,
    read_rope,
)
from worker.models.model import Decoder, Family, Placement
from worker.models.sandwich import SandwichLayer


@dataclass(frozen=True)
class Gemma3Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: HeadShape
    rms_norm_eps: float
    attention_bias: bool
    hidden_activation: Activation
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None
    sliding_window: int
    layer_kinds: list[str]
    ropes: dict[str, RopeConfig]  # by kind of layer

    @classmethod
    def read(cls, fields: Fields) -> Gemma3Config:
        if fields.boolean("use_bidirectional_attention", False):
            raise fields.error("use_bidirectional_attention (an encoder) is not supported")
        fields = fields.with_defaults(DEFAULTS)
        attention = read_head_shape(fields)
        layers = fields.layers()
        pattern = fields.integer("sliding_window_pattern", 6)
        plan = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)]
        cap = fields.number("final_logit_softcapping", 0.0)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            attention=attention,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, or_zero=True),
            attention_bias=fields.boolean("attention_bias", False),
            hidden_activation=fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            query_pre_attn_scalar=fields.number("query_pre_attn_scalar", 256),
            final_logit_softcapping=cap or None,
            sliding_window=fields.integer("sliding_window", 4096),
            layer_kinds=read_layer_kinds(fields, layers, plan, {SLIDING, FULL}),
            ropes=_ropes(fields, attention.dim),
        )


# Fields that published config.json files omit have the values of the first model.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


def _ropes(fields: Fields, head_dim: int) -> dict[str, RopeConfig]:
    """RoPE by kind of layer: only global layers are scaled; sliding ones have a smaller theta.

    rope_parameters may have one object per kind. rope_scaling, the older field, applies to the
    global layers only.
    """
    by_kind = fields.inner("rope_parameters") or Fields({}, fields.where)
    if SLIDING in by_kind.values or FULL in by_kind.values:
        old = fields.inner("rope_scaling")
        merged = {**(by_kind.values.get(FULL) or {}), **(old.values if old else {})}
        full = {**fields.values, "rope_scaling": None, "rope_parameters": merged}
    else:
        full = {**fields.values}
    sliding = {
        "max_position_embeddings": fields.values.get("max_position_embeddings"),
        "rope_theta": fields.values.get("rope_local_base_freq"),
        "rope_parameters": by_kind.values.get(SLIDING),
    }
    return {
        FULL: read_rope(Fields(full, fields.where), head_dim, theta=1_000_000.0),
        SLIDING: read_rope(Fields(sliding, fields.where), head_dim, theta=10_000.0),
    }


def gemma3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Gemma 3 with empty weights."""
    config = Gemma3Config.read(fields)
    linears, norm = place.linears, place.zero_centred_norm(config.rms_norm_eps)
    hidden = config.hidden_size
    ropes = {kind: Rope(rope, place.dtype, place.device) for kind, rope in config.ropes.items()}

    def layer(kind: str) -> SandwichLayer:
        window = config.sliding_window if kind == SLIDING else None
        return SandwichLayer(
            input_norm=norm(hidden),
            attention=SelfAttention(
                hidden,
                config.attention,
                linears,
                bias=config.attention_bias,
                norm=norm,
                scale=config.query_pre_attn_scalar**-0.5,
            ),
            post_attention_norm=norm(hidden),
            pre_mlp_norm=norm(hidden),
            mlp=GatedMLP(hidden, config.intermediate_size, linears, act=config.hidden_activation),
            post_mlp_norm=norm(hidden),
            rope=ropes[kind],
            make_cache=lambda: place.kv_cache(config.attention, window),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer(kind) for kind in config.layer_kinds],
        norm=norm(hidden),
        tied=tied,
        context_length=config.ropes[FULL].max_positions,  # stretched already
        place=place,
        embed_scale=hidden**0.5,
        logit_cap=config.final_logit_softcapping,
    )


GEMMA3 = Family(gemma3, tie_word_embeddings=True)
