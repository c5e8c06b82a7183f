"""Qwen3.5 (2026), dense and MoE, text half: Qwen3-Next's layers with plain projections."""

from __future__ import annotations

from worker.layers.mlp import GatedMLP
from worker.models.fields import Fields
from worker.models.model import Decoder, FeedForward, Placement
from worker.models.qwen3_moe import ExpertsConfig
from worker.models.qwen3_next import HybridConfig, hybrid


def qwen3_5(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3.5 with dense layers, its weights still empty."""
    config = HybridConfig.read(fields)
    inner = fields.integer("intermediate_size", 12_288)

    def make_mlp(index: int) -> FeedForward:
        return GatedMLP(config.hidden_size, inner, place.linear)

    return hybrid(config, make_mlp, tied, place, grouped=False)


def qwen3_5_moe(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3.5-MoE, its weights still empty: every layer is sparse, weights always sum to 1."""
    config = HybridConfig.read(fields)
    values = {**fields.values, "mlp_only_layers": [], "decoder_sparse_step": 1}
    values["norm_topk_prob"] = True
    mixture = ExpertsConfig.read(
        Fields(values, fields.where),
        num_experts=256,
        per_token=8,
        inner=512,
        normalise=True,
        shared=512,
    )

    def make_mlp(index: int) -> FeedForward:
        return mixture.sparse_mlp(config.hidden_size, place)

    return hybrid(config, make_mlp, tied, place, grouped=False)
