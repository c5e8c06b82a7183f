"""Qwen3-Next (2025): the hybrid layers with a mixture of experts and a shared expert."""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.models.config_fields import Fields
from worker.models.hybrid import HYBRID_DEFAULTS, HybridConfig, hybrid
from worker.models.mixture import ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Placement

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS = {
    **HYBRID_DEFAULTS,
    "intermediate_size": 5632,
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}


def qwen3_next(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3-Next with empty weights."""
    fields = fields.with_defaults(DEFAULTS)
    config, mixture = HybridConfig.read(fields), ExpertsConfig.read(fields)
    inner = fields.integer("intermediate_size")

    def make_mlp(index: int) -> FeedForward:
        if mixture.sparse[index]:
            return mixture.sparse_mlp(config.hidden_size, place)
        return GatedMLP(config.hidden_size, inner, place.linears)

    return hybrid(config, make_mlp, tied, place, grouped=True)


QWEN3_NEXT = Family(qwen3_next)
