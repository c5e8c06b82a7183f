"""Mistral (Jiang et al. 2023) and Ministral: Llama's layers with a sliding window.

Mistral's window applies to every layer; Ministral has sliding and full layers.
"""

from __future__ import annotations

from typing import Any

from worker.models.config_fields import SLIDING, Fields
from worker.models.model import Decoder, Family, Placement
from worker.models.pre_norm import PreNormConfig, one_window, pre_norm, windows_by_kind

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


def mistral(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Mistral with empty weights."""
    return pre_norm(read_mistral(fields), tied, place)


def ministral(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Ministral with empty weights."""
    return pre_norm(read_ministral(fields), tied, place)


def read_mistral(fields: Fields) -> PreNormConfig:
    fields = _with_fixed(fields)
    return PreNormConfig.read(fields, one_window(fields))


def read_ministral(fields: Fields) -> PreNormConfig:
    fields = _with_fixed(fields)
    fields.integer("head_dim")  # transformers has no default
    return PreNormConfig.read(fields, windows_by_kind(fields, [SLIDING] * fields.layers()))


def _with_fixed(fields: Fields) -> Fields:
    """The family has no biases: transformers ignores attention_bias."""
    return Fields({**DEFAULTS, **fields.values, "attention_bias": False}, fields.where)


MISTRAL, MINISTRAL = Family(mistral), Family(ministral)
