"""Fields of a config.json for mixtures of experts and for hybrids with delta nets.

Each function returns the fields that differ from the common ones, `fields`.
"""

from __future__ import annotations

from typing import Any

from worker.gguf.architectures import (
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
    Architecture,
)
from worker.gguf.read.header import Tensors
from worker.gguf.read.metadata import Metadata
from worker.gguf.read.rope import partial_factor, require_all_rotated
from worker.models.config_fields import FULL, LINEAR


def _experts(metadata: Metadata, architecture: Architecture) -> dict[str, Any]:
    used = metadata.size("expert_used_count")
    wide = metadata.size("feed_forward_length", 1, minimum=0)
    shared = _shared_expert(metadata) if architecture.shared_expert else {}
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": metadata.size("expert_feed_forward_length", max(1, wide // used)),
        "norm_topk_prob": architecture.normalised,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        **shared,
    }


def _shared_expert(metadata: Metadata) -> dict[str, Any]:
    wide = metadata.size("feed_forward_length", 1, minimum=0) or 1
    size = metadata.size("expert_shared_feed_forward_length", wide)
    return {"shared_expert_intermediate_size": size}


def qwen2moe(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {
        "model_type": "qwen2_moe",
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        **_experts(metadata, QWEN2_MOE),
    }


def qwen3moe(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {"model_type": "qwen3_moe", **_experts(metadata, QWEN3_MOE)}


def gpt_oss(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    """Every other layer slides. llama.cpp rounds the bounds of yarn to whole channels, which the
    published config.json does not."""
    require_all_rotated(metadata, fields["head_dim"])
    rope = fields.get("rope_scaling") or {"rope_type": "default"}
    return {
        "model_type": "gpt_oss",
        "num_local_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "intermediate_size": metadata.size("expert_feed_forward_length"),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "sliding_window": metadata.size("attention.sliding_window"),
        "rope_scaling": rope,
    }


def _hybrid(
    metadata: Metadata, fields: dict[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """Delta nets with full attention at intervals. Keys and values of a delta net have heads of
    ssm.state_size channels."""
    layers = fields["num_hidden_layers"]
    interval = metadata.size("full_attention_interval", architecture.full_every)
    plan = [(index + 1) % interval != 0 for index in range(layers)]
    recurrent = metadata.flags("attention.recurrent_layers", layers) or plan
    value_heads, inner = metadata.size("ssm.time_step_rank"), metadata.size("ssm.inner_size")
    key_heads = metadata.size("ssm.group_count")
    if inner % value_heads:
        raise metadata.error(f"{value_heads} heads can't share {inner} channels of a delta net")
    if value_heads % key_heads:
        raise metadata.error(f"{value_heads} value heads can't share {key_heads} key heads")
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": metadata.size("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": metadata.size("ssm.conv_kernel"),
        "layer_types": [LINEAR if linear else FULL for linear in recurrent],
        "partial_rotary_factor": partial_factor(metadata, fields["head_dim"]),
    }


def qwen35(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "qwen3_5_text", **_hybrid(metadata, fields, QWEN35)}


def qwen35moe(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    return _hybrid_moe(metadata, fields, QWEN35_MOE)


def qwen3next(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    """The converter separates the grouped projections, which is all that distinguishes the layers
    from those of Qwen3.5-MoE."""
    return _hybrid_moe(metadata, fields, QWEN3_NEXT)


def _hybrid_moe(
    metadata: Metadata, fields: dict[str, Any], architecture: Architecture
) -> dict[str, Any]:
    return {
        "model_type": "qwen3_5_moe_text",
        **_hybrid(metadata, fields, architecture),
        **_experts(metadata, architecture),
    }
