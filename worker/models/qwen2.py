"""Qwen2 and Qwen2.5, dense (Qwen2 technical report, 2024): Llama's layers with biases of queries,
keys and values.

With use_sliding_window, some layers attend within a sliding window.
"""

from __future__ import annotations

from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import Fields
from worker.models.model import Decoder, Family, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, pre_norm, windows_from_layer

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
}


def qwen2(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen2 with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    config = PreNormConfig.read(fields, windows_from_layer(fields))

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(
            config.hidden_size, config.attention, place.linears, bias=True, out_bias=False
        )

    return pre_norm(config, tied, place, make_mixer=make_mixer)


QWEN2 = Family(qwen2)
