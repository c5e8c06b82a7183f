"""The configuration of a model in a GGUF file: the fields of a config.json for the family that runs
its architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jobs.errors import JobError
from worker.gguf import architectures
from worker.gguf.architectures import Architecture
from worker.gguf.read import dense, mixtures
from worker.gguf.read.header import Tensors
from worker.gguf.read.metadata import ARCHITECTURE, Metadata
from worker.gguf.read.rope import ReadFactors, rope_fields
from worker.gguf.tensor_format import EMBEDDING, HEAD
from worker.models.config_fields import MAX_LAYERS

ReadConfig = Callable[[Metadata, Tensors, dict[str, Any]], dict[str, Any]]

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
    if name not in CONFIGS:
        raise JobError(
            "unsupported_model",
            f"unsupported {ARCHITECTURE} '{name}' in {metadata.where}; supported: "
            f"{', '.join(sorted(CONFIGS))}",
        )
    return CONFIGS[name][0]


def config_fields(metadata: Metadata, tensors: Tensors, factors: ReadFactors) -> dict[str, Any]:
    """The fields of a config.json that describes the same model. `factors` reads a tensor of RoPE
    factors. Raises JobError("unsupported_model")."""
    find_architecture(metadata)
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
    _, read_config = CONFIGS[metadata.architecture]
    return fields | read_config(metadata, tensors, fields)


# The fields of each architecture that differ from the common ones, with model_type.
CONFIGS: dict[str, tuple[Architecture, ReadConfig]] = {
    architecture.name: (architecture, read)
    for architecture, read in (
        (architectures.GEMMA2, dense.gemma2),
        (architectures.GEMMA3, dense.gemma3),
        (architectures.GLM4, dense.glm4),
        (architectures.GPT_OSS, mixtures.gpt_oss),
        (architectures.GRANITE, dense.granite),
        (architectures.LLAMA, dense.llama),
        (architectures.OLMO2, dense.olmo2),
        (architectures.PHI3, dense.phi3),
        (architectures.QWEN2, dense.qwen2),
        (architectures.QWEN2_MOE, mixtures.qwen2moe),
        (architectures.QWEN3, dense.qwen3),
        (architectures.QWEN35, mixtures.qwen35),
        (architectures.QWEN35_MOE, mixtures.qwen35moe),
        (architectures.QWEN3_MOE, mixtures.qwen3moe),
        (architectures.QWEN3_NEXT, mixtures.qwen3next),
        (architectures.SMOLLM3, dense.smollm3),
    )
}
