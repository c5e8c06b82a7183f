"""The names of a file's tensors in safetensors files of the same model.

The names come from the `gguf` package, which maps the second kind to the first. Here are the
names of the second kind that the families use.
"""

from __future__ import annotations

from gguf.tensor_mapping import get_tensor_name_map

from worker.gguf.architectures import Architecture

MODEL = ("model.embed_tokens", "model.norm", "lm_head")
LAYER = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.gate",
    *(f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")),
    *(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
    "mlp.shared_expert_gate",
    *(f"linear_attn.{part}" for part in ("A_log", "conv1d", "norm", "out_proj")),
    *(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a", "ba", "qkvz")),
)
# Names that take precedence: where a family merges tensors, or names them differently.
MERGED = ("self_attn.qkv_proj", "mlp.gate_up_proj")
OWN = {
    "phi3": MERGED,
    "glm4": (*MERGED, "post_self_attn_layernorm", "post_mlp_layernorm"),
    "mixtral": ("block_sparse_moe.gate",),
    "gpt_oss": ("mlp.router", "self_attn.sinks"),
}


def names_of(architecture: Architecture, model_type: str, layers: int) -> dict[str, str]:
    """The base of a name in the file → the base in safetensors files, without `.weight` or `.bias`.
    `blk.0.attn_q` → `model.layers.0.self_attn.q_proj`."""
    known = get_tensor_name_map(architecture.number, layers)
    per_layer = (*OWN.get(model_type, ()), *LAYER)
    bases = [*MODEL, *(f"model.layers.{i}.{part}" for i in range(layers) for part in per_layer)]
    found: dict[str, str] = {}
    for base in bases:
        name = known.get_name(base)
        if name is not None:
            found.setdefault(name, base)
    return found
