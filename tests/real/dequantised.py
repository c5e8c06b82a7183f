"""A GGUF file as a folder of safetensors in float32, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def dequantise(file: Path, folder: Path) -> Any:
    """Write config, weights and tokenizer of `file` to `folder`. Returns transformers' model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # transformers refuses to save a model that it has read from a GGUF file.
    tied = {"lm_head.weight"} if loaded.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.contiguous()
        for name, tensor in loaded.state_dict().items()
        if name not in tied
    }
    loaded.config.__dict__.pop("quantization_config", None)  # the blocks of the GGUF file
    loaded.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return loaded
