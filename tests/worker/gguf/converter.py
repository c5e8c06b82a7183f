"""Writes GGUF files from checkpoints, as llama.cpp's convert_hf_to_gguf.py does.

Independent of the code that reads them: it goes from a config.json and safetensors to the keys,
names and values that the converter writes, with the `gguf` package's writer.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor

from tests.worker.gguf.conversions import (
    TILED,
    changed,
    gpt_oss_experts,
    llama3_factors,
)

ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "smollm3": "smollm3",
}
EXACT = ("ffn_gate_inp.weight", "ssm_conv1d.weight")
HYBRID = ("qwen3next", "qwen35", "qwen35moe")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
MIXTRAL_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def convert(folder: Path, out: Path, kind: Type = Type.F32, **options: Any) -> Path:
    """Write the model in `folder` as `out`. Matrices are stored as `kind`, others as F32.
    `options`: see write_vocabulary; metadata and tensors for further entries; encode in place of
    `gguf`'s quantiser."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    out.parent.mkdir(parents=True, exist_ok=True)
    split = {"split_max_tensors": options["split"]} if "split" in options else {}
    writer = gguf.GGUFWriter(out, architecture, **split)
    write_config(writer, architecture, config)
    if "vocabulary" in options:
        options["vocabulary"](writer)
    else:
        write_byte_level(writer, folder, config)
    for key, value in options.get("metadata", {}).items():
        add(writer, key, value)
    tensors = dict(stored_tensors(folder, architecture, config))
    tensors.update(options.get("tensors", {}))
    for name, tensor in tensors.items():
        values = tensor.float().contiguous().numpy()
        if tensor.dim() < 2 or not name.endswith("weight") or name.endswith(EXACT):
            writer.add_tensor(name, values)
        elif kind is Type.F16:
            writer.add_tensor(name, values.astype(np.float16))
        elif kind is Type.F32:
            writer.add_tensor(name, values)
        else:
            stored = options.get("encode", gguf.quants.quantize)(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A metadata entry of the type that fits the value."""
    kinds = {str: "string", bool: "bool", int: "uint32", float: "float32", list: "array"}
    for data in writer.kv_data:
        data.pop(key, None)
    getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def write_config(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if config.get("intermediate_size"):
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if architecture not in ("phi3", "granite"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(full.get("rope_theta", 10_000.0))
    partial = full.get("partial_rotary_factor", 1.0)
    writer.add_rope_dimension_count(int(head_dim * partial))
    kind = full.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(full["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if architecture == "phi3":
        original = config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_sliding_window(config.get("sliding_window") or 0)
        if kind == "longrope":
            stretch = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(
                math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
            )
    if config.get("num_experts_per_tok"):
        writer.add_expert_count(config.get("num_local_experts") or config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config.get("moe_intermediate_size") and architecture != "llama":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if architecture in HYBRID:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(
            config["linear_value_head_dim"] * config["linear_num_value_heads"]
        )
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    if architecture in TILED:  # positions of images, which text has none of
        dim = int(head_dim * partial) // 2  # time, height and width take turns
        writer.add_rope_dimension_sections(
            [dim - dim // 3 - (dim + 1) // 3, (dim + 1) // 3, dim // 3, 0]
        )
    write_windows_and_scales(writer, architecture, config)


def write_windows_and_scales(
    writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]
) -> None:
    sliding = [kind == "sliding_attention" for kind in config.get("layer_types") or []]
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config["sliding_window"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if architecture == "gemma3":
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)
        writer.add_sliding_window_pattern(sliding)
    if config["model_type"] == "olmo3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(sliding)
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def write_byte_level(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """The vocabulary of the folder's tokenizer.json, which is Qwen's kind."""
    values = json.loads((folder / "tokenizer.json").read_text())
    rows = config["vocab_size"]
    tokens, kinds = [f"[PAD{i}]" for i in range(rows)], [gguf.TokenType.UNUSED] * rows
    for token, index in values["model"]["vocab"].items():
        tokens[index], kinds[index] = token, gguf.TokenType.NORMAL
    for entry in values["added_tokens"]:
        tokens[entry["id"]] = entry["content"]
        special = entry["special"]
        kinds[entry["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in values["model"]["merges"]])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def stored_tensors(folder: Path, architecture: str, config: dict[str, Any]):
    """(name in the file, values as they are stored)."""
    layers = config["num_hidden_layers"]
    number = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, layers)
    stacks: dict[str, dict[int, Tensor]] = {}
    source = load_file(folder / "model.safetensors")
    for name, tensor in source.items():
        name = name.replace("model.language_model.", "model.")
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        expert = EXPERT.fullmatch(name)
        if expert is not None:
            part = MIXTRAL_NAMES.get(expert[3], expert[3])
            prefix = expert[1].replace("block_sparse_moe", "mlp")
            stacks.setdefault(f"{prefix}.experts.{part}.weight", {})[int(expert[2])] = tensor
            continue
        if architecture == "gpt-oss" and "experts" in name:
            yield from gpt_oss_experts(name, tensor)
            continue
        if name.endswith(".experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            gate, up = tensor.chunk(2, dim=1)
            stacks[f"{base}gate_proj.weight"] = dict(enumerate(gate))
            stacks[f"{base}up_proj.weight"] = dict(enumerate(up))
            continue
        if name.endswith(".experts.down_proj"):
            stacks[f"{name}.weight"] = dict(enumerate(tensor))
            continue
        for key, values in changed(name, tensor, architecture, config).items():
            found = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert found is not None, key
            yield found, values
    for name, experts in stacks.items():
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None and architecture == "llama":
            part = {f"{v}.weight": k for k, v in MIXTRAL_NAMES.items()}[name.split("experts.")[1]]
            layer = name.split(".")[2]
            theirs = f"layers.{layer}.feed_forward.experts.{part}.weight"
            found = names.get_name(theirs, try_suffixes=(".weight",))
        assert found is not None, name
        yield found, torch.stack([experts[i] for i in range(len(experts))])
    full = config.get("rope_parameters") or {}
    full = full.get("full_attention", full)
    if full.get("rope_type") == "llama3":
        yield "rope_freqs.weight", llama3_factors(full, config)
    if full.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", torch.tensor(full["long_factor"])
        yield "rope_factors_short.weight", torch.tensor(full["short_factor"])
