"""Granite 3 and 4, dense (IBM, 2024): Llama's layers with multipliers of the embeddings, the
residual branches, the attention scores and the logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.layers.mlp import GatedMLP
from worker.layers.rope import Rope
from worker.layers.self_attention import SelfAttention
from worker.models.config_fields import Fields
from worker.models.model import Decoder, Family, Placement, PreNormLayer
from worker.models.pre_norm import PreNormConfig

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class GraniteLayer(PreNormLayer):
    """x += multiplier · mixer(norm(x)); x += multiplier · mlp(norm(x))."""

    multiplier: float

    def feed_forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + mixed * self.multiplier
        return x + self.mlp(self.post_norm(x)) * self.multiplier


def granite(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Granite with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    layers = fields.layers()
    config = PreNormConfig.read(fields, (None,) * layers)
    hidden, norm = config.hidden_size, place.norm(config.rms_norm_eps)
    scale, multiplier = (
        fields.number(f"{name}_multiplier", or_zero=True) for name in ("attention", "residual")
    )
    mlp_bias = fields.boolean("mlp_bias", False)
    rope = Rope(config.rope, place.dtype, place.device)

    def layer() -> GraniteLayer:
        return GraniteLayer(
            input_norm=norm(hidden),
            mixer=SelfAttention(
                hidden, config.attention, place.linears, bias=config.attention_bias, scale=scale
            ),
            post_norm=norm(hidden),
            mlp=GatedMLP(
                hidden,
                config.intermediate_size,
                place.linears,
                act=config.hidden_act,
                bias=mlp_bias,
            ),
            multiplier=multiplier,
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer() for _ in range(layers)],
        norm=norm(hidden),
        tied=tied,
        context_length=config.rope.context,
        place=place,
        embed_scale=fields.number("embedding_multiplier"),
        logit_divisor=fields.number("logits_scaling"),
    )


GRANITE = Family(granite)
