"""The variants of each family that the fidelity tests compare: base shapes with other fields."""

from __future__ import annotations

from typing import Any

from tests.worker.checkpoints import FAMILIES, WRAPPED

# Scaled RoPE variants.
ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        **{"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 120,  # one prompt is longer, the others stay below
        "factor": 2.0,
    },
}
# Name → family, and fields that differ from its base shape.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in (*FAMILIES, *WRAPPED)},
    "llama biases, tied, wide heads": (
        "llama",
        {
            **{"attention_bias": True, "mlp_bias": True, "head_dim": 32},
            "tie_word_embeddings": True,
        },
    ),
    **{
        f"llama {kind}": (
            "llama",
            {
                "head_dim": 16,
                "max_position_embeddings": 256,
                "rope_scaling": {"rope_type": kind, "rope_theta": 5e3, **more},
            },
        )
        for kind, more in ROPE.items()
    },
    "llama dynamic, beyond its positions": (
        "llama",
        {
            "max_position_embeddings": 100,
            "rope_scaling": {"rope_type": "dynamic", "rope_theta": 5e3, "factor": 2.0},
        },
    ),
    **{
        f"{family} sliding": (
            family,
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        )
        for family in ("qwen2", "qwen3")
    },
    "phi3 longrope, three quarters rotated": (
        "phi3",
        {
            **{"num_attention_heads": 2, "head_dim": 16, "partial_rotary_factor": 0.75},
            **{"max_position_embeddings": 512, "original_max_position_embeddings": 120},
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + 0.1 * i for i in range(6)],
                "long_factor": [2.0 + i for i in range(6)],
            },
        },
    ),
    "gemma2 without caps": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "smollm3 sliding, biases": (
        "smollm3",
        {
            **{"no_rope_layers": [1, 0, 0, 1, 1], "attention_bias": True, "mlp_bias": True},
            **{"use_sliding_window": True, "sliding_window": 7},
        },
    ),
    "olmo3 both ropes": (
        "olmo3",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_theta": 300.0, "rope_type": "yarn"} | ROPE["yarn"],
            },
        },
    ),
    "olmo3 old fields": (
        "olmo3",
        {"rope_theta": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "glm4 no biases, all rotated": (
        "glm4",
        {"attention_bias": False, "partial_rotary_factor": 1.0},
    ),
    "gpt_oss no biases, full layers first, plain rope": (
        "gpt_oss",
        {
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "mistral sliding": ("mistral", {"sliding_window": 9}),
    "qwen3_moe free weights, every other layer": (
        "qwen3_moe",
        {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": []},
    ),
    "qwen2_moe no biases, sliding, dense first": (
        "qwen2_moe",
        {
            **{"qkv_bias": False, "norm_topk_prob": False, "mlp_only_layers": [0]},
            **{"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
        },
    ),
    "qwen3_moe gelu": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh"}),
    **{f"llama {act}": ("llama", {"hidden_act": act}) for act in ("gelu", "gelu_new", "relu")},
    "qwen3 with more rows than tokens": ("qwen3", {"vocab_size": 700}),
    **{
        f"{family} ignores partial": (family, {"partial_rotary_factor": 0.5})
        for family in ("llama", "gemma3_text")
    },
    "qwen3 eps 0, yarn mscale 0": (
        "qwen3",
        {
            "rms_norm_eps": 0.0,
            "rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 0.0, "mscale": 1.0}
            | ROPE["yarn"],
        },
    ),
    "gemma3 sliding rope alone": (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    ),
    "gemma3 both ropes and a stretch": (
        "gemma3_text",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3 soft cap": ("gemma3_text", {"final_logit_softcapping": 5.0}),
}

# One constant of a family, changed: the logits must differ.
DISTURBED: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 9e3, "rope_parameters": None}),
    "eps": ("qwen3", {"rms_norm_eps": 1e-2}),
    "router normalisation": ("qwen3_moe", {"norm_topk_prob": False}),
    "experts per token, other names": ("mixtral", {"num_experts_per_tok": 3}),
    "merged tensors, fewer rotated": (
        "phi3",
        {"partial_rotary_factor": 0.5, "rope_parameters": None},
    ),
    "clamp of the gate": ("gpt_oss", {"swiglu_limit": 1.0}),
    "slope of the gate": ("gpt_oss", {"swiglu_alpha": 1.0}),
    "score cap": ("gemma2", {"attn_logit_softcapping": 2.5}),
    "logit cap": ("gemma2", {"final_logit_softcapping": 4.0}),
    "residual multiplier": ("granite", {"residual_multiplier": 0.6}),
    "attention multiplier": ("granite", {"attention_multiplier": 0.6}),
    "embedding multiplier": ("granite", {"embedding_multiplier": 4.0}),
    "logit divisor": ("granite", {"logits_scaling": 3.0}),
    "layers without rotary positions": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "window of three layers in four": ("olmo3", {"sliding_window": 5}),
    "partial rotary in pairs": (
        "glm4",
        {"partial_rotary_factor": 0.25, "rope_parameters": None},
    ),
    "unnormalised router": ("qwen2_moe", {"norm_topk_prob": False}),
    "experts per token": ("qwen3_moe", {"num_experts_per_tok": 3}),
    "window": ("gemma3_text", {"sliding_window": 5}),
    "window of all layers": ("mistral", {"sliding_window": 5}),
    "score scale": ("gemma3_text", {"query_pre_attn_scalar": 64}),
    "layer kinds": ("qwen3_5_text", {"rms_norm_eps": 1e-3}),
    "activation": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "partial rotary": (
        "qwen3_next",
        {"partial_rotary_factor": 0.5, "rope_parameters": None},
    ),
}
