"""Qwen3, dense (Qwen3 technical report, 2025): Llama's layers with normalised queries and keys.

With use_sliding_window, some layers attend within a sliding window.
"""

from __future__ import annotations

from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import Fields
from worker.models.model import Decoder, Family, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, pre_norm, windows_from_layer

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}


def qwen3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3 with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    config = PreNormConfig.read(fields, windows_from_layer(fields))

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(
            config.hidden_size,
            config.attention,
            place.linears,
            bias=config.attention_bias,
            norm=place.norm(config.rms_norm_eps),
        )

    return pre_norm(config, tied, place, make_mixer=make_mixer)


QWEN3 = Family(qwen3)
