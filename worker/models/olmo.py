"""OLMo 2 and OLMo 3 (Ai2, 2024 and 2025): norms after attention and MLP instead of before, and
queries and keys normalised whole, before they are split into heads.

OLMo 3 has three sliding layers, then a full one, with RoPE of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.mlp import ACTIVATIONS, GatedMLP
from worker.layers.norm import Norm
from worker.layers.rope import Rope, RopeConfig, Rotation
from worker.layers.self_attention import HeadShape, SelfAttention
from worker.layers.weights.slot import WeightSlot
from worker.models.config_fields import FULL, SLIDING, Fields, read_head_shape, read_rope
from worker.models.model import Decoder, Family, Placement
from worker.models.pre_norm import Windows, windows_by_kind

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
OLMO3_DEFAULTS = {**DEFAULTS, "sliding_window": 4096}
OLMO3_THETA = 500_000.0


@dataclass(frozen=True)
class PostNormLayer:
    """x += norm(attention(x)); x += norm(mlp(x))."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: GatedMLP
    mlp_norm: Norm
    rope: Rope
    make_cache: Callable[[], LayerCache]

    def mix(self, x: Tensor, rotate: Rotation, cache: Any, batch: Batch) -> Tensor:
        return self.attention(x, rotate, cache, batch)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.attention_norm(mixed)
        return x + self.mlp_norm(self.mlp(x))

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            f"{prefix}.post_attention_layernorm.weight": self.attention_norm.weight_slot(),
            f"{prefix}.post_feedforward_layernorm.weight": self.mlp_norm.weight_slot(),
            **self.attention.weight_map(f"{prefix}.self_attn"),
            **self.mlp.weight_map(f"{prefix}.mlp"),
        }


def olmo2(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """OLMo 2 with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    attention = read_head_shape(fields)
    rope = read_rope(fields, attention.dim)
    windows = (None,) * fields.layers()
    return _decoder(fields, tied, place, attention, windows, full=rope, sliding=rope)


def olmo3(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """OLMo 3 with empty weights."""
    fields = fields.with_defaults(OLMO3_DEFAULTS)
    attention, windows = read_head_shape(fields), read_windows(fields)
    full, sliding = read_ropes(fields, attention.dim)
    return _decoder(fields, tied, place, attention, windows, full=full, sliding=sliding)


def read_windows(fields: Fields) -> Windows:
    plan = [FULL if (i + 1) % 4 == 0 else SLIDING for i in range(fields.layers())]
    return windows_by_kind(fields, plan)


def read_ropes(fields: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of OLMo 3's full layers, and that of its sliding ones."""
    # rope_parameters has one object per kind of layer. rope_scaling and rope_theta, the older
    # fields, are of the full layers only.
    by_kind = fields.inner("rope_parameters") or Fields({}, fields.where)
    old, full, sliding = (
        holder.inner(name)
        for holder, name in ((fields, "rope_scaling"), (by_kind, FULL), (by_kind, SLIDING))
    )
    merged = {**(full.values if full else {}), **(old.values if old else {})}
    full_fields = {**fields.values, "rope_scaling": None, "rope_parameters": merged}
    sliding_fields = {
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "rope_parameters": sliding.values if sliding else None,
    }
    full_rope, sliding_rope = (
        read_rope(Fields(values, fields.where), head_dim, theta=OLMO3_THETA)
        for values in (full_fields, sliding_fields)
    )
    return full_rope, sliding_rope


def _decoder(
    fields: Fields,
    tied: bool,
    place: Placement,
    attention: HeadShape,
    windows: Windows,
    *,
    full: RopeConfig,
    sliding: RopeConfig,
) -> Decoder:
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    bias = fields.boolean("attention_bias", False)
    act = fields.choice("hidden_act", ACTIVATIONS, "silu")
    linears, norm = place.linears, place.norm(fields.number("rms_norm_eps", or_zero=True))
    full_rope = Rope(full, place.dtype, place.device)
    sliding_rope = Rope(sliding, place.dtype, place.device)

    def layer(window: int | None) -> PostNormLayer:
        return PostNormLayer(
            attention=SelfAttention(
                hidden, attention, linears, bias=bias, norm=norm, norm_per_head=False
            ),
            attention_norm=norm(hidden),
            mlp=GatedMLP(hidden, inner, linears, act=act),
            mlp_norm=norm(hidden),
            rope=full_rope if window is None else sliding_rope,
            make_cache=lambda: place.kv_cache(attention, window),
        )

    return Decoder(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        layers=[layer(window) for window in windows],
        norm=norm(hidden),
        tied=tied,
        context_length=full.context,
        place=place,
    )


OLMO2, OLMO3 = Family(olmo2), Family(olmo3)
