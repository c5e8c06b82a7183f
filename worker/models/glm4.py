"""GLM-4 0414 (Z.ai, 2025), dense: norms before and after attention and MLP; half of the channels
rotate, in pairs of neighbours.

Other families rotate pairs (i, i + half). Loading brings the rows of queries and keys into that
order, which leaves their products unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from worker.layers.batch import Batch
from worker.layers.kv_cache import KVCache
from worker.layers.mlp import GatedMLP
from worker.layers.rope import Rope, Rotation
from worker.layers.self_attention import SelfAttention
from worker.layers.weights.quantised_tensor import Weight
from worker.layers.weights.slot import WeightSlot
from worker.models.config_fields import Fields
from worker.models.model import Decoder, Family, Placement
from worker.models.pre_norm import PreNormConfig
from worker.models.sandwich import SandwichLayer

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}


@dataclass(frozen=True)
class PairedAttention:
    """Self-attention whose checkpoints rotate channels (2i, 2i + 1) of the first `rotated`."""

    attention: SelfAttention
    head_dim: int
    rotated: int

    def __call__(self, x: Tensor, rotate: Rotation, cache: KVCache, batch: Batch) -> Tensor:
        return self.attention(x, rotate, cache, batch)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.attention.weight_map(prefix)
        rotating = (f"{prefix}.q_proj.", f"{prefix}.k_proj.")
        return slots | {
            name: self._reordered(slot) for name, slot in slots.items() if name.startswith(rotating)
        }

    def _reordered(self, slot: WeightSlot) -> WeightSlot:
        order = torch.arange(self.head_dim)
        order[: self.rotated] = order[: self.rotated].view(-1, 2).T.flatten()

        def load(tensor: Weight) -> None:
            starts = torch.arange(0, tensor.shape[0], self.head_dim)
            rows = (starts[:, None] + order).flatten()
            slot.fill(tensor[rows.to(tensor.device)])

        return replace(slot, load=load, load_quantised=load)


def glm4(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """GLM-4 with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    layers = fields.layers()
    config = PreNormConfig.read(fields, (None,) * layers, partial=0.5)
    hidden, norm = config.hidden_size, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)

    def layer() -> SandwichLayer:
        attention = SelfAttention(
            hidden, config.attention, place.linears, bias=config.attention_bias, out_bias=False
        )
        return SandwichLayer(
            input_norm=norm(hidden),
            attention=PairedAttention(attention, config.attention.dim, config.rope.dim),
            post_attention_norm=norm(hidden),
            pre_mlp_norm=norm(hidden),
            mlp=GatedMLP(
                hidden,
                config.intermediate_size,
                place.linears,
                act=config.hidden_act,
                merged=True,
            ),
            post_mlp_norm=norm(hidden),
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention),
            post_attention_name="post_self_attn_layernorm",
            pre_mlp_name="post_attention_layernorm",
            post_mlp_name="post_mlp_layernorm",
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer() for _ in range(layers)],
        norm=norm(hidden),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )


GLM4 = Family(glm4)
