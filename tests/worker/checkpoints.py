"""Small random checkpoints in the format of published ones.

`make_checkpoint` writes a folder that both chatjobs and transformers can load. transformers is
imported when the first checkpoint is made, so importing this module is cheap.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.worker.templates import QWEN_TEMPLATE
from tests.worker.tokenizers import make_tokenizer, save_tokenizer

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3_text",
    "mistral",
    "ministral",
    "mixtral",
    "qwen2_moe",
    "phi3",
    "gemma2",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "glm4",
    "gpt_oss",
)
# A model type for each kind of cache.
KINDS = {"full": "qwen3", "window": "gemma3_text", "recurrent": "qwen3_5_text"}
# Model types with a vision tower around a text model → the model type of the text model.
WRAPPED = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# The first of two layers; the second has full attention, as all layers of other families.
_FIRST_LAYERS = {
    **dict.fromkeys(
        ("gemma2", "gemma3", "gemma3_text", "gpt_oss", "ministral", "olmo3"), "sliding_attention"
    ),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        "linear_attention",
    ),
}
ZERO_CENTRED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma2", "gemma3_text"}

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_SHARED = {"shared_expert_intermediate_size": 24}
_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen3_next": {**_DELTA, **_EXPERTS, **_SHARED},
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, **_SHARED},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": None},
    "ministral": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, **_SHARED, "norm_topk_prob": True},
    "phi3": {"head_dim": 8},
    "gemma2": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
        "head_dim": 8,
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "olmo2": {"head_dim": 8},
    "olmo3": {"head_dim": 8, "num_hidden_layers": 4, "sliding_window": 9},
    "glm4": {"attention_bias": True},
    "gpt_oss": {
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 5e3, "factor": 8.0, "truncate": False},
            "original_max_position_embeddings": 64,
        },
        "swiglu_limit": 1.5,
    },
}
_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 32, "patch_size": 8},
}
_AROUND: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {
            **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
            **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
        },
        "image_token_index": 3,
        "mm_tokens_per_image": 4,
    },
    "mistral3": {
        "vision_config": {
            **{"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16},
            **{"num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8},
            **{"image_size": 16, "patch_size": 8},
        },
    },
    "qwen3_5": {"vision_config": _QWEN_VISION},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION},
}
_CLASSES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "gemma3_text": "Gemma3",
    "mistral": "Mistral",
    "mistral3": "Mistral3",
    "ministral": "Ministral",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "phi3": "Phi3",
    "gemma2": "Gemma2",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
}


def make_checkpoint(
    path: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "float32",
    **config_overrides: Any,
) -> Path:
    """Write a folder with a small random model and a Qwen-style tokenizer, using transformers.

    The weights are chosen so that an error anywhere shows in the logits: matrices are normal with
    std 0.3, norm weights are close to the family's identity (1, or 0 if zero-centred).
    """
    import torch

    transformers: Any = import_module("transformers")
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, "qwen", QWEN_TEMPLATE)
    tokenizer = make_tokenizer("qwen")
    end = tokenizer.token_to_id("<|im_end|>")
    pad = tokenizer.token_to_id("<|endoftext|>")
    text = WRAPPED.get(family, family)
    prefix = _CLASSES.get(family, _CLASSES[text])
    fields = {
        **_SIZES,
        **_FIELDS[text],
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "eos_token_id": end,
        "bos_token_id": None,
        "pad_token_id": pad,
        **config_overrides,
    }
    transformers.utils.logging.disable_progress_bar()
    if family in WRAPPED:
        inner = {"model_type": text, **fields}
        config = getattr(transformers, f"{prefix}Config")(text_config=inner, **_AROUND[family])
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    else:
        suffix = "TextConfig" if family.endswith("_text") else "Config"
        config = getattr(transformers, f"{prefix}{suffix}")(**fields)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    _fill(model, text in ZERO_CENTRED, torch.Generator().manual_seed(seed))
    model.to(getattr(torch, dtype))
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[end, pad], pad_token_id=pad
    )
    model.save_pretrained(path)
    if shards > 1:
        split(path, shards)
    return path


def make_shallow_checkpoint(path: Path, family: str, **fields: Any) -> Path:
    """Write a model of two layers, one of each kind: for tests of many steps."""
    if family in _FIRST_LAYERS:
        fields["layer_types"] = [_FIRST_LAYERS[family], "full_attention"]
    return make_checkpoint(path, family, num_hidden_layers=2, **fields)


def _fill(model: Any, zero_centred: bool, random: Any) -> None:
    """Random values for every parameter, depending on its kind."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if name.endswith("norm.weight"):
                centre = 0.0 if zero_centred and "linear_attn.norm" not in name else 1.0
                parameter.copy_(centre + 0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)
    model.tie_weights()


def split(path: Path, shards: int) -> None:
    """Split a folder's model.safetensors into shards with an index."""
    from safetensors.torch import load_file, save_file

    single = path / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    single.unlink()
