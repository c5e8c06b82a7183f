"""Checkpoints with random weights: complete model folders of a given shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from worker.demo import MODEL_DIR

QWEN3_06B: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
}

QWEN3_8B: dict[str, Any] = {
    **QWEN3_06B,
    **{"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "tie_word_embeddings": False},
}

QWEN3_30B_A3B: dict[str, Any] = {
    **QWEN3_8B,
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48},
    **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    **{"moe_intermediate_size": 768, "norm_topk_prob": True},
}

# Layers as those of Qwen3-30B-A3B, half as wide, and eight of them: 2.5 billion parameters, 0.2 of
# them used by a token.
QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32_000,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
    "rope_theta": 1_000_000,
    "rms_norm_eps": 1e-6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}


def random_checkpoint(folder: Path, family: str, shape: dict[str, Any], seed: int = 0) -> Path:
    """A bf16 checkpoint of the family's transformers class, weights normal with std 0.02, with the
    demo model's tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **shape, dtype="bfloat16")
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
    return folder
