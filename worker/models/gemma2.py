"""Gemma 2 (Gemma 2 technical report, 2024).

Zero-centred norms before and after attention and MLP, embeddings scaled by sqrt(hidden), sliding
and full layers in turn, soft caps on attention scores and logits.
"""

from __future__ import annotations

from typing import Any

from worker.layers.mlp import ACTIVATIONS, GatedMLP
from worker.layers.rope import Rope
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import FULL, SLIDING, Fields, read_head_shape, read_rope
from worker.models.model import Decoder, Family, Placement
from worker.models.pre_norm import Windows, windows_by_kind
from worker.models.sandwich import SandwichLayer

# Defaults of fields that a config.json may omit, equal to transformers'. A cap of null is no cap.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def read_windows(fields: Fields) -> Windows:
    plan = [FULL if i % 2 else SLIDING for i in range(fields.layers())]
    return windows_by_kind(fields, plan)


def gemma2(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Gemma 2 with empty weights."""
    if fields.boolean("use_bidirectional_attention", False):
        raise fields.error("use_bidirectional_attention (an encoder) is not supported")
    fields = fields.with_defaults(DEFAULTS)
    attention = read_head_shape(fields)
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias = fields.boolean("attention_bias", False)
    act = fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    scale = fields.number("query_pre_attn_scalar") ** -0.5
    cap = fields.number("attn_logit_softcapping", 0.0) or None
    linears = place.linears
    norm = place.zero_centred_norm(fields.number("rms_norm_eps", 1e-6, or_zero=True))
    positions = read_rope(fields, attention.dim)
    rope = Rope(positions, place.dtype, place.device)

    def layer(window: int | None) -> SandwichLayer:
        return SandwichLayer(
            input_norm=norm(hidden),
            attention=SelfAttention(hidden, attention, linears, bias=bias, scale=scale, cap=cap),
            post_attention_norm=norm(hidden),
            pre_mlp_norm=norm(hidden),
            mlp=GatedMLP(hidden, inner, linears, act=act),
            post_mlp_norm=norm(hidden),
            rope=rope,
            make_cache=lambda: place.kv_cache(attention, window),
        )

    return Decoder(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=[layer(window) for window in read_windows(fields)],
        norm=norm(hidden),
        tied=tied,
        context_length=positions.context,
        place=place,
        embed_scale=hidden**0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0) or None,
    )


GEMMA2 = Family(gemma2, tie_word_embeddings=True)
