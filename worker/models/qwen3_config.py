"""The config fields that Qwen3 and Qwen3-MoE share."""

from __future__ import annotations

from dataclasses import dataclass

from worker.layers.mlp import ACTIVATIONS, Activation
from worker.layers.rope import RopeConfig
from worker.layers.self_attention import HeadShape
from worker.models.fields import Fields, read_head_shape, read_layer_kinds, read_rope


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
    """The window of each layer: layer_types decides, or by default max_window_layers."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    window = fields.integer("sliding_window", 4096)
    first = fields.integer("max_window_layers", 28, minimum=0)
    plan = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    kinds = read_layer_kinds(fields, layers, plan, {"sliding_attention", "full_attention"})
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
