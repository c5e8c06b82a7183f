"""The changes of llama.cpp's converter to the values of a model's tensors."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

PERMUTED = ("llama", "granite", "smollm3")
ZERO_CENTRED = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")
TILED = ("qwen35", "qwen35moe")


def changed(
    name: str, tensor: Tensor, architecture: str, config: dict[str, Any]
) -> dict[str, Tensor]:
    """One tensor of the model after the conversion."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if architecture in PERMUTED and re.search(r"\.[qk]_proj\.", name):
        count = heads if ".q_proj." in name else kv_heads
        per_head = tensor.shape[0] // count
        tensor = tensor.reshape(count, 2, per_head // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    plain_norm = name.endswith("norm.weight") and "linear_attn" not in name
    if architecture in ZERO_CENTRED and plain_norm:
        tensor = tensor + 1
    if "linear_attn" in name:
        return linear_attention(name, tensor, architecture, config)
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    if name.endswith(".sinks"):
        name += ".weight"
    return {name: tensor}


def linear_attention(
    name: str, tensor: Tensor, architecture: str, config: dict[str, Any]
) -> dict[str, Tensor]:
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    shared, prefix = values // keys, name.split(".linear_attn.")[0] + ".linear_attn."
    part = name.removeprefix(prefix)
    if part == "in_proj_qkvz.weight":
        sizes = [key_dim, key_dim, shared * value_dim, shared * value_dim]
        q, k, v, z = tensor.view(keys, sum(sizes), -1).split(sizes, dim=1)
        hidden = tensor.shape[1]
        qkv = torch.cat([one.reshape(-1, hidden) for one in (q, k, v)])
        return {
            f"{prefix}in_proj_qkv.weight": qkv,
            f"{prefix}in_proj_z.weight": z.reshape(-1, hidden),
        }
    if part == "A_log":
        tensor = -tensor.exp()
    if part == "conv1d.weight":
        tensor = tensor.squeeze(1)
    if part == "dt_bias":
        name = f"{prefix}dt_proj.bias"
    if architecture not in TILED:
        return {name: tensor}

    def tile(rows: Tensor, dim: int) -> Tensor:
        """Value heads: from grouped by key head to tiled."""
        return rows.reshape(keys, shared, dim, -1).swapaxes(0, 1).reshape(rows.shape)

    both = 2 * keys * key_dim
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = torch.cat([tensor[:both], tile(tensor[both:], value_dim)])
    elif part == "in_proj_z.weight":
        tensor = tile(tensor, value_dim)
    elif part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
        tensor = tile(tensor, 1)
    elif part == "out_proj.weight":
        tensor = tile(tensor.T.contiguous(), value_dim).T
    return {name: tensor}


def gpt_oss_experts(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """[experts, in, out], or [experts, out] for biases; the channels of gate and up in turn."""
    layer = name.split(".")[2]
    suffix = "bias" if name.endswith("_bias") else "weight"
    if suffix == "weight":
        tensor = tensor.transpose(1, 2)
    parts = {"down": tensor}
    if "gate_up" in name:
        parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]}
    return [(f"blk.{layer}.ffn_{part}_exps.{suffix}", values) for part, values in parts.items()]


def llama3_factors(rope: dict[str, Any], config: dict[str, Any]) -> Tensor:
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in frequencies.tolist():
        length = 2 * math.pi / frequency
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)
