"""SmolLM3 (Hugging Face, 2025): Llama's layers, some without rotary positions (NoPE)."""

from __future__ import annotations

from typing import Any

from worker.layers.mlp import GatedMLP
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import FULL, SLIDING, Fields
from worker.models.model import Decoder, Family, FeedForward, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, Windows, pre_norm, windows_by_kind

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}


def read_rotary(fields: Fields) -> list[bool]:
    """True for each layer that rotates: a 1 in no_rope_layers, by default three of four layers."""
    layers = fields.layers()
    interval = fields.integer("no_rope_layer_interval", 4)
    plan = [float((i + 1) % interval != 0) for i in range(layers)]
    rotary = fields.numbers("no_rope_layers", plan)
    if len(rotary) < layers:
        raise fields.error(f"no_rope_layers must hold a number for each of {layers} layers")
    return [value != 0 for value in rotary[:layers]]


def read_windows(fields: Fields, rotary: list[bool]) -> Windows:
    """With use_sliding_window, the layers without rotary positions slide."""
    if not fields.boolean("use_sliding_window", False):
        return (None,) * len(rotary)
    return windows_by_kind(fields, [FULL if rotates else SLIDING for rotates in rotary])


def smollm3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """SmolLM3 with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    rotary = read_rotary(fields)
    config = PreNormConfig.read(fields, read_windows(fields, rotary), theta=2e6)
    mlp_bias = fields.boolean("mlp_bias", False)

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(
            config.hidden_size,
            config.attention,
            place.linears,
            bias=config.attention_bias,
            rotary=rotary[index],
        )

    def make_mlp(index: int) -> FeedForward:
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            place.linears,
            act=config.hidden_act,
            bias=mlp_bias,
        )

    return pre_norm(config, tied, place, make_mixer=make_mixer, make_mlp=make_mlp)


SMOLLM3 = Family(smollm3, tie_word_embeddings=True)
