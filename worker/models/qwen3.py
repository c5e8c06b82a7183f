"""Qwen3, dense (Qwen3 technical report, 2025): Llama's shape with normed queries and keys.

Sliding-window layers where the config switches them on (use_sliding_window).
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.layers.mlp import ACTIVATIONS, Activation, GatedMLP
from worker.layers.rope import Rope, RopeConfig
from worker.layers.self_attention import HeadShape, SelfAttention
from worker.models.fields import Fields, read_head_shape, read_layer_kinds, read_rope
from worker.models.model import Decoder, Placement, PreNormLayer

# What a config.json may leave out, as transformers fills it in.
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}


@dataclass(frozen=True)
class Qwen3Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: HeadShape
    rms_norm_eps: float
    attention_bias: bool
    hidden_act: Activation
    rope: RopeConfig
    windows: tuple[int | None, ...]  # per layer; None: full attention

    @classmethod
    def read(cls, fields: Fields) -> Qwen3Config:
        attention = read_head_shape(fields)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            attention=attention,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, or_zero=True),
            attention_bias=fields.boolean("attention_bias", False),
            hidden_act=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            rope=read_rope(fields, attention.dim),
            windows=_windows(fields, fields.layers()),
        )


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Which layers slide: layer_types if given, else those from max_window_layers on."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    plan = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = read_layer_kinds(fields, layers, plan, {"sliding_attention", "full_attention"})
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3, its weights still empty."""
    config = Qwen3Config.read(fields.with_defaults(DEFAULTS))
    make, norm = place.linear, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)

    def layer(window: int | None) -> PreNormLayer:
        return PreNormLayer(
            input_norm=norm(config.hidden_size),
            mixer=SelfAttention(
                config.hidden_size, config.attention, make, bias=config.attention_bias, norm=norm
            ),
            post_norm=norm(config.hidden_size),
            mlp=GatedMLP(config.hidden_size, config.intermediate_size, make, act=config.hidden_act),
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention, window),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=[layer(window) for window in config.windows],
        norm=norm(config.hidden_size),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )
