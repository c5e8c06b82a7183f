"""Qwen3.5 (2026), dense and MoE, text model: the hybrid layers with ungrouped projections."""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.models.config_fields import Fields
from worker.models.hybrid import HYBRID_DEFAULTS, HybridConfig, hybrid
from worker.models.mixture import ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Placement

# Defaults of fields that a config.json may omit, equal to transformers'.
DENSE_DEFAULTS = {**HYBRID_DEFAULTS, "intermediate_size": 12_288, "num_key_value_heads": 4}
MOE_DEFAULTS = {
    **HYBRID_DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


def qwen3_5(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Dense Qwen3.5 with empty weights."""
    fields = fields.with_defaults(DENSE_DEFAULTS)
    config = HybridConfig.read(fields)
    inner = fields.integer("intermediate_size")

    def make_mlp(index: int) -> FeedForward:
        return GatedMLP(config.hidden_size, inner, place.linears)

    return hybrid(config, make_mlp, tied, place, grouped=False)


def with_fixed(fields: Fields) -> Fields:
    """Of a mixture: with the defaults, and the fields that a config.json doesn't state."""
    fixed = {"mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
    return Fields({**MOE_DEFAULTS, **fields.values, **fixed}, fields.where)


def qwen3_5_moe(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3.5-MoE with empty weights. All layers are sparse; router weights always sum to 1."""
    fields = with_fixed(fields)
    config, mixture = HybridConfig.read(fields), ExpertsConfig.read(fields)

    def make_mlp(index: int) -> FeedForward:
        return mixture.sparse_mlp(config.hidden_size, place)

    return hybrid(config, make_mlp, tied, place, grouped=False)


QWEN3_5, QWEN3_5_MOE = Family(qwen3_5), Family(qwen3_5_moe)
