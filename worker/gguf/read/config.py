"""The architectures of GGUF files, each with the family that runs it: a config.json for the family,
and what the converter changed in the values of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobs.errors import JobError
from worker.gguf.read import dense, mixtures
from worker.gguf.read.header import Tensors
from worker.gguf.read.metadata import ARCHITECTURE, Metadata
from worker.gguf.read.rope import ReadFactors, rope_fields
from worker.models.fields import MAX_LAYERS

EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Architecture:
    """`config`: the fields that differ from the common ones, with model_type."""

    config: Callable[[Metadata, Tensors, dict[str, Any]], dict[str, Any]]
    permuted: bool = False  # rows of queries and keys are in the order of neighbouring pairs
    zero_centred: bool = False  # norms are stored as 1 + w
    tiled: bool = False  # value heads of the delta nets are ordered by their place in a group


# Files that hold something else, by their general.type, with what to do.
OTHER_KINDS = {
    "adapter": "merge the LoRA adapter into its base model with llama.cpp's llama-export-lora, and "
    "give the merged file",
    "mmproj": "it is a vision tower; give the GGUF file of the text model beside it",
}


def find_architecture(metadata: Metadata) -> Architecture:
    """Raises JobError for an architecture that no family runs."""
    name, kind = metadata.architecture, metadata.text("general.type", "model")
    if kind != "model":
        remedy = OTHER_KINDS.get(kind, "give the GGUF file of the model")
        raise metadata.error(f"this file holds no model but {kind!r} (general.type): {remedy}")
    if name not in ARCHITECTURES:
        raise JobError(
            "unsupported_model",
            f"unsupported {ARCHITECTURE} '{name}' in {metadata.where}; supported: "
            f"{', '.join(sorted(ARCHITECTURES))}",
        )
    return ARCHITECTURES[name]


def config_fields(metadata: Metadata, tensors: Tensors, factors: ReadFactors) -> dict[str, Any]:
    """The fields of a config.json that describes the same model. `factors` reads a tensor of RoPE
    factors. Raises JobError("unsupported_model")."""
    architecture = find_architecture(metadata)
    if not metadata.flag("attention.causal", True):
        raise metadata.error("its attention is not causal (an encoder), which is not supported")
    if EMBEDDING not in tensors:
        raise metadata.error(f"it lacks the tensor {EMBEDDING}")
    hidden, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    head_dim = metadata.size("attention.key_length", max(1, hidden // heads))
    if metadata.size("attention.value_length", head_dim) != head_dim:
        raise metadata.error("heads of keys and values differ in size, which is not supported")
    blocks = metadata.size("block_count", maximum=MAX_LAYERS)
    predicting = metadata.size("nextn_predict_layers", 0, minimum=0)
    if predicting >= blocks:
        raise metadata.error(f"all of its {blocks} blocks predict further tokens")
    fields = {
        "vocab_size": tensors[EMBEDDING].shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.size("feed_forward_length", 1, minimum=0) or 1,
        "num_hidden_layers": blocks - predicting,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.scale("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.size("context_length"),
        "tie_word_embeddings": HEAD not in tensors,
        **rope_fields(metadata, factors),
    }
    return fields | architecture.config(metadata, tensors, fields)


ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(dense.gemma2, zero_centred=True),
    "gemma3": Architecture(dense.gemma3, zero_centred=True),
    "glm4": Architecture(dense.glm4),
    "gpt-oss": Architecture(mixtures.gpt_oss),
    "granite": Architecture(dense.granite, permuted=True),
    "llama": Architecture(dense.llama, permuted=True),
    "olmo2": Architecture(dense.olmo2),
    "phi3": Architecture(dense.phi3),
    "qwen2": Architecture(dense.qwen2),
    "qwen2moe": Architecture(mixtures.qwen2moe),
    "qwen3": Architecture(dense.qwen3),
    "qwen35": Architecture(mixtures.qwen35, zero_centred=True, tiled=True),
    "qwen35moe": Architecture(mixtures.hybrid_moe, zero_centred=True, tiled=True),
    "qwen3moe": Architecture(mixtures.qwen3moe),
    "qwen3next": Architecture(mixtures.hybrid_moe, zero_centred=True),
    "smollm3": Architecture(dense.smollm3, permuted=True),
}
