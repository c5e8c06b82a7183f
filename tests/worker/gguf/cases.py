"""The models and vocabularies whose answers from llama.cpp are recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from tests.worker.checkpoints import make_checkpoint
from tests.worker.gguf.converter import convert
from tests.worker.gguf.vocabularies import write_vocabulary_file, write_wide_vocabulary_file
from worker.gguf.pre_tokenizers import PRE_TOKENIZERS

PROMPT, COUNT = list(range(5, 25)), 64
# llama.cpp takes these from the architecture, not from the file.
FIXED: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gpt_oss": {
        "swiglu_limit": 7.0,
        "num_hidden_layers": 4,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0},
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"head_dim": 8},
    "qwen2_moe": {"head_dim": 8, "norm_topk_prob": False},
    "smollm3": {"no_rope_layer_interval": 4},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e3, "factor": 4.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
}
LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "long_factor": [1.0 + 0.1 * i for i in range(4)],
}
# Name → family, and fields that differ from its base shape.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        family: (family, FIXED.get(family, {}))
        for family in (
            *("gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral"),
            *("mixtral", "olmo2", "olmo3", "phi3", "qwen2", "qwen2_moe", "qwen3"),
            *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3"),
        )
    },
    "llama tied, biases, wide heads": (
        "llama",
        {
            **{"attention_bias": True, "mlp_bias": True, "head_dim": 32},
            "tie_word_embeddings": True,
        },
    ),
    "llama llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama linear": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}},
    ),
    "qwen3 yarn": (
        "qwen3",
        {
            "rope_scaling": {
                **{"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0},
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "phi3 longrope": (
        "phi3",
        {
            **{"head_dim": 8, "max_position_embeddings": 512},
            "original_max_position_embeddings": 120,
            "rope_scaling": {"type": "longrope", **LONG},
        },
    ),
}
KINDS = {"F32": Type.F32, "F16": Type.F16}
STYLES = ("llama2", "llama3", "qwen", "gemma")


def make_model(folder: Path, name: str) -> Path:
    """The checkpoint of a model."""
    family, fields = MODELS[name]
    return make_checkpoint(folder, family, **fields)


def make_file(checkpoint: Path, out: Path, kind: str) -> Path:
    return convert(checkpoint, out, KINDS[kind])


def vocabularies() -> list[str]:
    """The styles, and wide vocabularies: SentencePiece, and one for each kind of pre-tokenizer."""
    kinds = dict.fromkeys(PRE_TOKENIZERS.values())
    names = [next(n for n, kind in PRE_TOKENIZERS.items() if kind == one) for one in kinds]
    return [*STYLES, "wide sentencepiece", *(f"wide {name}" for name in names)]


def make_vocabulary(path: Path, name: str) -> Path:
    if not name.startswith("wide "):
        style: Any = name
        return write_vocabulary_file(path, style, "llama-bpe" if name == "llama3" else "qwen2")
    pre = name.removeprefix("wide ")
    return write_wide_vocabulary_file(path, None if pre == "sentencepiece" else pre)
