"""Mixtral (Jiang et al. 2024): Mistral's layers, each with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from worker.layers.experts import SparseMLP
from worker.layers.weights.slot import WeightSlot
from worker.models.config_fields import Fields
from worker.models.mixture import ALL_SPARSE, ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Placement
from worker.models.pre_norm import PreNormConfig, one_window, pre_norm

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts": 8,  # num_local_experts in published files
    "num_experts_per_tok": 2,
}
# The names of an expert's projections in checkpoints.
NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True)
class MixtralBlock:
    """A sparse MLP with the names of Mixtral's checkpoints."""

    mlp: SparseMLP

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp(x)

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self.mlp.weight_map(prefix.removesuffix("mlp") + "block_sparse_moe")
        return {_renamed(name): slot for name, slot in slots.items()}


def _renamed(name: str) -> str:
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def with_fixed(fields: Fields) -> Fields:
    """With the defaults, and the fields that a config.json doesn't state."""
    fields = fields.with_defaults(DEFAULTS)
    fixed = {
        **ALL_SPARSE,
        "moe_intermediate_size": fields.integer("intermediate_size"),
        "norm_topk_prob": True,
        "attention_bias": False,
    }
    return Fields({**fields.values, **fixed}, fields.where)


def read_config(fields: Fields) -> PreNormConfig:
    """`fields` are those of `with_fixed`."""
    return PreNormConfig.read(fields, one_window(fields), theta=1e6)


def mixtral(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Mixtral with empty weights. All layers are sparse; router weights always sum to 1."""
    fields = with_fixed(fields)
    config, mixture = read_config(fields), ExpertsConfig.read(fields)

    def make_mlp(index: int) -> FeedForward:
        return MixtralBlock(mixture.sparse_mlp(config.hidden_size, place))

    return pre_norm(config, tied, place, make_mlp=make_mlp)


MIXTRAL = Family(mixtral)
