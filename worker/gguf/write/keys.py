"""The metadata of GGUF files that most architectures share, and what they cannot state.

llama.cpp fixes by architecture what a config.json could say otherwise. A model with other values
there is refused, because llama.cpp would answer differently.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from jobs.errors import JobError
from worker.gguf.architectures import Architecture
from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.tensor_format import FREQUENCIES, LONG, SHORT
from worker.layers.mlp import ACTIVATIONS
from worker.layers.rope import RopeConfig, longrope_factor
from worker.layers.self_attention import HeadShape
from worker.models.config_fields import Fields
from worker.models.pre_norm import PreNormConfig, Windows

Keys = dict[str, Any]  # metadata, without the architecture's prefix


@dataclass(frozen=True)
class Facts:
    """The values of a config.json that a GGUF file needs. `longrope`: llama.cpp reads its factors
    for this architecture; `delta`: the layout of its delta nets."""

    keys: Keys
    attention: HeadShape
    rope: RopeConfig
    longrope: bool = False
    delta: DeltaNetRows | None = None

    def adding(self, keys: Keys) -> Self:
        return replace(self, keys=self.keys | keys)


def common(
    fields: Fields, hidden: int, attention: HeadShape, inner: int, rope: RopeConfig
) -> Facts:
    keys: Keys = {
        "block_count": fields.layers(),
        "context_length": rope.max_positions,
        "embedding_length": hidden,
        "feed_forward_length": inner,
        "attention.head_count": attention.heads,
        "attention.head_count_kv": attention.kv_heads,
        "attention.key_length": attention.dim,
        "attention.value_length": attention.dim,
        "attention.layer_norm_rms_epsilon": float(
            fields.number("rms_norm_eps", 1e-6, or_zero=True)
        ),
    }
    return Facts(keys, attention, rope)


def pre_norm(fields: Fields, config: PreNormConfig) -> Facts:
    """Of models without sliding layers."""
    require(fields, "hidden_act", "silu")
    without_windows(fields, config.windows, config.rope)
    return common(
        fields, config.hidden_size, config.attention, config.intermediate_size, config.rope
    )


def rope_keys(facts: Facts) -> Keys:
    """Raises JobError for RoPE that files of the architecture cannot state."""
    rope, scaling = facts.rope, facts.rope.scaling
    keys: Keys = {"rope.dimension_count": rope.dim, "rope.freq_base": float(rope.theta)}
    if rope.kind == "dynamic" or (rope.kind == "longrope" and not facts.longrope):
        raise JobError(
            "unsupported_model",
            f"RoPE of the type {rope.kind} cannot be stored in a GGUF file of this architecture; "
            "supported: default, linear, llama3, yarn, and longrope for phi3",
        )
    if rope.kind in ("linear", "yarn"):
        factor = scaling.get("factor") or rope.max_positions / rope.original
        keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(factor)}
    if rope.kind in ("yarn", "longrope"):
        keys["rope.scaling.original_context_length"] = rope.original
    if rope.kind == "longrope":
        keys["rope.scaling.attn_factor"] = longrope_factor(rope)
    if rope.kind == "yarn":
        keys["rope.scaling.yarn_beta_fast"] = float(scaling.get("beta_fast") or 32.0)
        keys["rope.scaling.yarn_beta_slow"] = float(scaling.get("beta_slow") or 1.0)
        given = {name for name, value in scaling.items() if value is not None}
        if {"attention_factor", "mscale", "mscale_all_dim"} & given:
            raise JobError(
                "unsupported_model",
                "RoPE of the type yarn with an attention_factor or mscale of its own cannot be "
                "stored in a GGUF file",
            )
        if scaling.get("truncate") is False:
            raise JobError(
                "unsupported_model",
                "RoPE of the type yarn with truncate false cannot be stored in a GGUF file",
            )
    return keys


def rope_tensors(rope: RopeConfig) -> dict[str, Tensor]:
    """The divisors of the frequencies, one per pair of channels, where that needs a tensor."""
    scaling = rope.scaling
    if rope.kind == "longrope":
        long, short = (torch.tensor(scaling[f"{name}_factor"]) for name in ("long", "short"))
        return {LONG: long.float(), SHORT: short.float()}
    if rope.kind != "llama3":
        return {}
    low, high, factor = (
        float(scaling[name]) for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    turns = rope.original / (2 * math.pi * rope.theta**exponents)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return {FREQUENCIES: (1 / ((1 - keep) / factor + keep)).float()}


def require(fields: Fields, name: str, value: str) -> None:
    """An activation."""
    given = fields.text(name, value)
    if ACTIVATIONS.get(given) is not ACTIVATIONS[value]:
        raise refused(fields, f"{name} is {given!r}, not {value!r}")


def without_windows(fields: Fields, windows: Windows, rope: RopeConfig) -> None:
    given = [window for window in windows if window is not None]
    if given and min(given) < rope.context:
        raise refused(fields, f"its layers attend within a sliding window of {min(given)} tokens")


def with_windows(fields: Fields, windows: Windows, architecture: Architecture) -> None:
    """All layers slide but those that the architecture fixes."""
    period = architecture.full_every
    if any((window is None) != ((i + 1) % period == 0) for i, window in enumerate(windows)):
        raise refused(fields, f"its layers do not slide but for every {period}th")


def without_biases(fields: Fields, *names: str) -> None:
    for name in names or ("attention_bias",):
        if fields.boolean(name, False):
            raise refused(fields, f"{name} is true")


def refused(fields: Fields, fact: str) -> JobError:
    return fields.error(f"{fact}, which GGUF files of this architecture cannot state")
