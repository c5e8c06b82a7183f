"""Qwen3, dense (Qwen3 technical report, 2025): Llama's layers with normalised queries and keys.

With use_sliding_window, some layers attend within a sliding window.
"""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.layers.rope import Rope
from worker.layers.self_attention import SelfAttention
from worker.models.fields import Fields
from worker.models.model import Decoder, Family, Placement, PreNormLayer
from worker.models.qwen3_config import Qwen3Config

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}


def qwen3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3 with empty weights."""
    config = Qwen3Config.read(fields.with_defaults(DEFAULTS))
    linears, norm = place.linears, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)

    def layer(window: int | None) -> PreNormLayer:
        return PreNormLayer(
            input_norm=norm(config.hidden_size),
            mixer=SelfAttention(
                config.hidden_size, config.attention, linears, bias=config.attention_bias, norm=norm
            ),
            post_norm=norm(config.hidden_size),
            mlp=GatedMLP(
                config.hidden_size, config.intermediate_size, linears, act=config.hidden_act
            ),
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


QWEN3 = Family(qwen3)
