"""Llama 1 to 3.3 and compatible models (Touvron et al. 2023; Grattafiori et al. 2024).

Pre-norm decoder with SwiGLU, RoPE and grouped query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.layers.mlp import ACTIVATIONS, Activation, GatedMLP
from worker.layers.rope import Rope, RopeConfig
from worker.layers.self_attention import HeadShape, SelfAttention
from worker.models.config_fields import Fields, read_head_shape, read_rope
from worker.models.model import Decoder, Family, Placement, PreNormLayer


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    attention: HeadShape
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    hidden_act: Activation
    rope: RopeConfig

    @classmethod
    def read(cls, fields: Fields) -> LlamaConfig:
        attention = read_head_shape(fields)
        return cls(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            num_hidden_layers=fields.layers(),
            attention=attention,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6, or_zero=True),
            attention_bias=fields.boolean("attention_bias", False),
            mlp_bias=fields.boolean("mlp_bias", False),
            hidden_act=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            rope=read_rope(fields, attention.dim),
        )


def llama(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Llama with empty weights."""
    config = LlamaConfig.read(fields)
    linears, norm = place.linears, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)

    def layer() -> PreNormLayer:
        return PreNormLayer(
            input_norm=norm(config.hidden_size),
            mixer=SelfAttention(
                config.hidden_size, config.attention, linears, bias=config.attention_bias
            ),
            post_norm=norm(config.hidden_size),
            mlp=GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                linears,
                act=config.hidden_act,
                bias=config.mlp_bias,
            ),
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=[layer() for _ in range(config.num_hidden_layers)],
        norm=norm(config.hidden_size),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )


LLAMA = Family(llama)
