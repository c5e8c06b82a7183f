"""A layer with norms before and after attention and MLP, as Gemma 2, Gemma 3 and GLM-4 have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.layers.batch import Batch
from worker.layers.cache import LayerCache
from worker.layers.norm import Norm
from worker.layers.rope import Rope, Rotation
from worker.layers.weights.slot import WeightSlot
from worker.models.model import FeedForward, Mixer


@dataclass(frozen=True)
class SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))). The norms' names in checkpoints are
    those of Gemma by default."""

    input_norm: Norm
    attention: Mixer
    post_attention_norm: Norm
    pre_mlp_norm: Norm
    mlp: FeedForward
    post_mlp_norm: Norm
    rope: Rope
    make_cache: Callable[[], LayerCache]
    post_attention_name: str = "post_attention_layernorm"
    pre_mlp_name: str = "pre_feedforward_layernorm"
    post_mlp_name: str = "post_feedforward_layernorm"

    def mix(self, x: Tensor, rotate: Rotation, cache: Any, batch: Batch) -> Tensor:
        return self.attention(self.input_norm(x), rotate, cache, batch)

    def feed_forward(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.post_attention_norm(mixed)
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            f"{prefix}.input_layernorm.weight": self.input_norm.weight_slot(),
            f"{prefix}.{self.post_attention_name}.weight": self.post_attention_norm.weight_slot(),
            f"{prefix}.{self.pre_mlp_name}.weight": self.pre_mlp_norm.weight_slot(),
            f"{prefix}.{self.post_mlp_name}.weight": self.post_mlp_norm.weight_slot(),
            **self.attention.weight_map(f"{prefix}.self_attn"),
            **self.mlp.weight_map(f"{prefix}.mlp"),
        }
