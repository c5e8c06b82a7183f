"""gpt-oss (OpenAI, 2025): sliding and full layers in turn with attention sinks, and in every layer
a mixture of experts with biases and a clamped gate.

Checkpoints stack the experts: [experts, in, out], the channels of gate and up in turn. GGUF files
have one tensor for each projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from worker.layers.experts import Experts, Router
from worker.layers.mlp import Gate, clamped
from worker.layers.self_attention import SelfAttention
from worker.layers.weights.slot import StackedPlace, WeightSlot
from worker.models.config_fields import FULL, SLIDING, Fields
from worker.models.mixture import ALL_SPARSE, ExpertsConfig
from worker.models.model import Decoder, Family, FeedForward, Mixer, Placement
from worker.models.pre_norm import PreNormConfig, pre_norm, windows_by_kind

# Defaults of fields that a config.json may omit, equal to transformers'.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "num_experts": 128,  # num_local_experts in published files
    "num_experts_per_tok": 4,
}
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SLOPE, LIMIT = 1.702, 7.0  # swiglu_alpha, swiglu_limit
# A projection of an expert, the tensor that stacks it, and its part of the channels there.
PROJECTIONS = (
    ("gate_proj", "gate_up_proj", slice(0, None, 2)),
    ("up_proj", "gate_up_proj", slice(1, None, 2)),
    ("down_proj", "down_proj", slice(None)),
)


class GptOssMLP:
    """A router with a bias, and experts with biases, by the names of gpt-oss' checkpoints."""

    def __init__(self, hidden: int, config: ExpertsConfig, gate: Gate, place: Placement) -> None:
        self._count = config.num_experts
        self._router = Router(
            hidden,
            self._count,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            place.linears,
            bias=True,
        )
        self._experts = Experts(
            self._count,
            hidden,
            config.moe_intermediate_size,
            place.linears,
            gate,
            stacked={},
            bias=True,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self._experts(x, *self._router(x))

    def weight_map(self, prefix: str) -> dict[str, WeightSlot]:
        slots = self._router.weight_map(f"{prefix}.router")
        for index in range(self._count):
            for part, stack, rows in PROJECTIONS:
                name = f"{prefix}.experts.{index}.{part}"
                weight, bias = self._slots(index, part)
                columns, count = weight.shape[1], weight.shape[0] * (rows.step or 1)
                shape = (self._count, columns, count)
                place = StackedPlace(f"{prefix}.experts.{stack}", shape, index, rows, True)
                slots[f"{name}.weight"] = replace(weight, stacked=place)
                place = StackedPlace(
                    f"{prefix}.experts.{stack}_bias", (self._count, count), index, rows
                )
                slots[f"{name}.bias"] = replace(bias, stacked=place)
        return slots

    def _slots(self, index: int, part: str) -> tuple[WeightSlot, WeightSlot]:
        """Weight and bias of one projection of an expert."""
        if part == "down_proj":
            down = self._experts.down
            return down.weight_slot(index), down.bias_slot(index)
        gate_up, which = self._experts.gate_up, int(part == "up_proj")
        return gate_up.weight_slot(index, which), gate_up.bias_slot(index, which)


def with_fixed(fields: Fields) -> Fields:
    """With the defaults, and the fields that a config.json doesn't state."""
    fields = fields.with_defaults(DEFAULTS)
    if fields.inner("rope_scaling") is None and fields.inner("rope_parameters") is None:
        fields = Fields({**fields.values, "rope_parameters": ROPE}, fields.where)
    inner = fields.integer("intermediate_size")
    fixed = {**ALL_SPARSE, "moe_intermediate_size": inner, "norm_topk_prob": True}
    return Fields({**fields.values, **fixed}, fields.where)


def read_config(fields: Fields) -> PreNormConfig:
    """`fields` are those of `with_fixed`."""
    plan = [FULL if i % 2 else SLIDING for i in range(fields.layers())]
    return PreNormConfig.read(fields, windows_by_kind(fields, plan), theta=150_000.0)


def gpt_oss(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """gpt-oss with empty weights. All layers are sparse; router weights always sum to 1."""
    fields = with_fixed(fields)
    config, mixture = read_config(fields), ExpertsConfig.read(fields)
    gate = clamped(
        fields.number("swiglu_alpha", SLOPE, or_zero=True),
        fields.number("swiglu_limit", LIMIT, or_zero=True),
    )

    def make_mixer(index: int) -> Mixer:
        return SelfAttention(
            config.hidden_size,
            config.attention,
            place.linears,
            bias=config.attention_bias,
            sinks=True,
        )

    def make_mlp(index: int) -> FeedForward:
        return GptOssMLP(config.hidden_size, mixture, gate, place)

    return pre_norm(config, tied, place, make_mixer=make_mixer, make_mlp=make_mlp)


GPT_OSS = Family(gpt_oss)
