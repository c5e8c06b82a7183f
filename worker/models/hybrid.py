"""The base of hybrid families: layers of gated delta nets with full attention at intervals.

Zero-centred norms, gated attention, partial rotary embeddings. Used by Qwen3-Next and Qwen3.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker.layers.delta_net import DeltaShape, GatedDeltaNet
from worker.layers.rope import Rope, RopeConfig
from worker.layers.self_attention import HeadShape, SelfAttention
from worker.models.config_fields import (
    FULL,
    LINEAR,
    Fields,
    read_head_shape,
    read_layer_kinds,
    read_rope,
)
from worker.models.model import Decoder, FeedForward, Placement, PreNormLayer

# Defaults of fields that a config.json may omit, equal to transformers'.
HYBRID_DEFAULTS = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class HybridConfig:
    """Everything but the MLPs: attention, delta nets, and which layer has which."""

    vocab_size: int
    hidden_size: int
    attention: HeadShape
    delta: DeltaShape
    rms_norm_eps: float
    attention_bias: bool
    rope: RopeConfig
    layer_kinds: list[str]

    @classmethod
    def read(cls, fields: Fields) -> HybridConfig:
        attention = read_head_shape(fields)
        layers = fields.layers()
        interval = fields.integer("full_attention_interval", 4)
        plan = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
        act = fields.text("hidden_act", "silu")
        if act != "silu":
            raise fields.error(f"unsupported hidden_act {act!r}; supported: silu")
        delta = DeltaShape(
            key_heads=fields.integer("linear_num_key_heads"),
            value_heads=fields.integer("linear_num_value_heads"),
            key_dim=fields.integer("linear_key_head_dim"),
            value_dim=fields.integer("linear_value_head_dim"),
            kernel=fields.integer("linear_conv_kernel_dim", minimum=2),
        )
        if delta.value_heads % delta.key_heads:
            raise fields.error(
                f"{delta.value_heads} linear value heads can't share {delta.key_heads} key heads"
            )
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            attention=attention,
            delta=delta,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, or_zero=True),
            attention_bias=fields.boolean("attention_bias", False),
            rope=read_rope(fields, attention.dim, partial=0.25),
            layer_kinds=read_layer_kinds(fields, layers, plan, {LINEAR, FULL}),
        )


def hybrid(
    config: HybridConfig,
    make_mlp: Callable[[int], FeedForward],
    tied: bool,
    place: Placement,
    *,
    grouped: bool,
) -> Decoder:
    """A hybrid decoder with empty weights. `make_mlp` takes the layer index; `grouped`: see
    GatedDeltaNet."""
    linears, norm = place.linears, place.zero_centred_norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)
    hidden = config.hidden_size

    def layer(index: int, kind: str) -> PreNormLayer:
        parts: dict[str, Any]
        if kind == LINEAR:
            net = GatedDeltaNet(
                hidden, config.delta, linears, eps=config.rms_norm_eps, grouped=grouped
            )
            parts = {"mixer": net, "mixer_name": "linear_attn", "make_cache": net.make_cache}
        else:
            attention = SelfAttention(
                hidden,
                config.attention,
                linears,
                bias=config.attention_bias,
                norm=norm,
                gated=True,
            )
            parts = {
                "mixer": attention,
                "make_cache": lambda: place.kv_cache(config.attention),
            }
        return PreNormLayer(
            input_norm=norm(hidden),
            post_norm=norm(hidden),
            mlp=make_mlp(index),
            rope=rope,
            **parts,
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer(index, kind) for index, kind in enumerate(config.layer_kinds)],
        norm=norm(hidden),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )
