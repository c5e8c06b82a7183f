"""Phi-3, Phi-3.5 and Phi-4, dense, text models (Abdin et al. 2024).

Llama's layers, with one checkpoint tensor for queries, keys and values and one for gate and up.
Long-context versions have longrope; Phi-4-mini rotates three quarters of the channels.
"""

from __future__ import annotations

from typing import Any

from worker.layers.mlp import GatedMLP
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import Fields
from worker.models.model import Decoder, Family, FeedForward, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, one_window, pre_norm

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
OLD_LONGROPE = ("su", "yarn")  # its names in the first checkpoints


def phi3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Phi-3 with empty weights."""
    fields = renamed_longrope(fields.with_defaults(DEFAULTS))
    config = PreNormConfig.read(fields, one_window(fields), partial=1.0)

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(config.hidden_size, config.attention, place.linears, merged=True)

    def make_mlp(index: int) -> FeedForward:
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            place.linears,
            act=config.hidden_act,
            merged=True,
        )

    return pre_norm(config, tied, place, make_mixer=make_mixer, make_mlp=make_mlp)


def renamed_longrope(fields: Fields) -> Fields:
    name = "rope_scaling" if fields.inner("rope_scaling") else "rope_parameters"
    rope = fields.inner(name)
    if rope is None or rope.text("rope_type", rope.text("type", "default")) not in OLD_LONGROPE:
        return fields
    return Fields({**fields.values, name: {**rope.values, "rope_type": "longrope"}}, fields.where)


PHI3 = Family(phi3)
