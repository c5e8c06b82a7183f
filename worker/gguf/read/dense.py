"""Fields of a config.json for dense architectures.

Each function returns the fields that differ from the common ones, `fields`.
"""

from __future__ import annotations

from typing import Any

from worker.gguf.architectures import GEMMA2, GEMMA3, OLMO2, SMOLLM3, Architecture
from worker.gguf.read.header import Tensors
from worker.gguf.read.metadata import Metadata
from worker.gguf.read.rope import partial_factor, require_all_rotated
from worker.models.config_fields import FULL, SLIDING


def llama(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    """Also Mistral, Mixtral, Yi, SmolLM and others. With biases of queries, keys and values alone,
    the layers are those of Qwen2."""
    require_all_rotated(metadata, fields["head_dim"])
    experts = metadata.size("expert_count", 0, minimum=0)
    if experts:
        return {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": metadata.size("expert_used_count"),
        }
    biased, all_biased = ("blk.0.attn_q.bias" in tensors, "blk.0.attn_output.bias" in tensors)
    if biased and not all_biased:
        return {"model_type": "qwen2"}
    return {"model_type": "llama", **_biases(tensors)}


def _biases(tensors: Tensors) -> dict[str, Any]:
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def qwen2(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {"model_type": "qwen2"}


def qwen3(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {"model_type": "qwen3", "attention_bias": "blk.0.attn_q.bias" in tensors}


def _score_scale(architecture: Architecture, fields: dict[str, Any]) -> float:
    """query_pre_attn_scalar, which files don't hold: the size of a head, except in the largest
    model."""
    if fields["num_hidden_layers"] == architecture.largest:
        return float(fields["hidden_size"] // fields["num_attention_heads"])
    return float(fields["head_dim"])


def _windows(
    metadata: Metadata, fields: dict[str, Any], architecture: Architecture
) -> dict[str, Any]:
    """The layers that slide: those of the architecture, unless the file has another pattern."""
    layers = fields["num_hidden_layers"]
    sliding = metadata.flags("attention.sliding_window_pattern", layers)
    if sliding is None:
        every = metadata.size("attention.sliding_window_pattern", architecture.full_every)
        sliding = [(index + 1) % every != 0 for index in range(layers)]
    return {"layer_types": [SLIDING if slides else FULL for slides in sliding]}


def gemma2(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _score_scale(GEMMA2, fields),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.scale("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.scale("final_logit_softcapping", 30.0) or None,
        **_windows(metadata, fields, GEMMA2),
    }


def gemma3(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    window = metadata.size("attention.sliding_window", 0, minimum=0)
    kinds: dict[str, Any] = {"layer_types": [FULL] * fields["num_hidden_layers"]}
    if window:
        kinds = {"sliding_window": window, **_windows(metadata, fields, GEMMA3)}
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _score_scale(GEMMA3, fields),
        "final_logit_softcapping": metadata.scale("final_logit_softcapping", 0.0) or None,
        "rope_local_base_freq": metadata.scale("rope.freq_base_swa", 10_000.0),
        **kinds,
    }


def phi3(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp ignores the sliding window of these files."""
    partial = partial_factor(metadata, fields["head_dim"])
    return {
        "model_type": "phi3",
        "sliding_window": None,
        "partial_rotary_factor": partial,
        "original_max_position_embeddings": metadata.size(
            "rope.scaling.original_context_length", fields["max_position_embeddings"]
        ),
    }


def granite(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    if metadata.size("expert_count", 0, minimum=0):
        raise metadata.error("granite files with experts are not supported")
    if not metadata.flag("rope.scaling.finetuned", True):
        raise metadata.error("granite files without rotary positions are not supported")
    default = fields["head_dim"] ** -0.5
    return {
        "model_type": "granite",
        "embedding_multiplier": metadata.scale("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.scale("residual_scale", 0.0) or 1.0,
        "attention_multiplier": metadata.scale("attention.scale", 0.0) or default,
        "logits_scaling": metadata.scale("logit_scale", or_zero=False),
        **_biases(tensors),
    }


def olmo2(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    """Files with a sliding window are OLMo 3. Their sliding layers are not stretched."""
    require_all_rotated(metadata, fields["head_dim"])
    window = metadata.size("attention.sliding_window", 0, minimum=0)
    if not window:
        return {"model_type": "olmo2"}
    theta = fields["rope_theta"]
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": theta},
            SLIDING: {
                "rope_type": "default",
                "rope_theta": metadata.scale("rope.freq_base_swa", theta),
            },
        },
        **_windows(metadata, fields, OLMO2),
    }


def smollm3(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    require_all_rotated(metadata, fields["head_dim"])
    return {
        "model_type": "smollm3",
        "no_rope_layer_interval": SMOLLM3.unrotated_every,
        **_biases(tensors),
    }


def glm4(metadata: Metadata, tensors: Tensors, fields: dict[str, Any]) -> dict[str, Any]:
    if any(metadata.values.get(metadata.key("rope.dimension_sections")) or ()):
        raise metadata.error("glm4 files with sections of rotary positions are not supported")
    partial = partial_factor(metadata, fields["head_dim"])
    biased = "blk.0.attn_q.bias" in tensors
    return {"model_type": "glm4", "partial_rotary_factor": partial, "attention_bias": biased}
