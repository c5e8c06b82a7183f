"""The base of pre-norm families: config fields, the windows of their layers, and the decoder.

A family passes what it does differently: its attention, its MLP, the defaults of its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from worker.models.model import Decoder, FeedForward, Mixer, Placement, PreNormLayer

Windows = tuple[int | None, ...]  # per layer; None: full attention


@dataclass(frozen=True)
class PreNormConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: HeadShape
    rms_norm_eps: float
    attention_bias: bool
    hidden_act: Activation
    rope: RopeConfig
    windows: Windows

    @classmethod
    def read(
        cls,
        fields: Fields,
        windows: Windows,
        *,
        theta: float = 10_000.0,
        partial: float | None = None,
    ) -> PreNormConfig:
        """`theta` and `partial` are the family's defaults, as in `read_rope`."""
        attention = read_head_shape(fields)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            attention=attention,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, or_zero=True),
            attention_bias=fields.boolean("attention_bias", False),
            hidden_act=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            rope=read_rope(fields, attention.dim, theta=theta, partial=partial),
            windows=windows,
        )


def one_window(fields: Fields) -> Windows:
    """sliding_window in every layer, unless it is null (Mistral, Mixtral, Phi-3)."""
    window: int | None = fields.integer("sliding_window", None)
    return (window,) * fields.layers()


def windows_by_kind(fields: Fields, plan: list[str]) -> Windows:
    """sliding_window in the sliding layers of layer_types, by default those of `plan`."""
    kinds = read_layer_kinds(fields, fields.layers(), plan, {SLIDING, FULL})
    window: int | None = fields.integer("sliding_window", None)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def windows_from_layer(fields: Fields) -> Windows:
    """With use_sliding_window, layers from max_window_layers on slide (Qwen2, Qwen3)."""
    layers = fields.layers()
    if not fields.boolean("use_sliding_window", False):
        return (None,) * layers
    first = fields.integer("max_window_layers", 28, minimum=0)
    plan = [SLIDING if i >= first else FULL for i in range(layers)]
    return windows_by_kind(fields.with_defaults({"sliding_window": 4096}), plan)


def pre_norm(
    config: PreNormConfig,
    tied: bool,
    place: Placement,
    *,
    make_mixer: Callable[[int], Mixer] | None = None,
    make_mlp: Callable[[int], FeedForward] | None = None,
) -> Decoder:
    """A decoder of pre-norm layers with empty weights. `make_mixer` and `make_mlp` take the index
    of the layer; by default they make plain attention and a gated MLP."""
    norm, hidden = place.norm(config.rms_norm_eps), config.hidden_size
    rope = Rope(config.rope, place.dtype, place.device)

    def mixer(index: int) -> Mixer:
        return SelfAttention(hidden, config.attention, place.linears, bias=config.attention_bias)

    def mlp(index: int) -> FeedForward:
        return GatedMLP(hidden, config.intermediate_size, place.linears, act=config.hidden_act)

    def layer(index: int, window: int | None) -> PreNormLayer:
        return PreNormLayer(
            input_norm=norm(hidden),
            mixer=(make_mixer or mixer)(index),
            post_norm=norm(hidden),
            mlp=(make_mlp or mlp)(index),
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
