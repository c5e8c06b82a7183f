"""Dense families: what their GGUF files say. Each function raises JobError for a model that files
of its architecture cannot state."""

from __future__ import annotations

from worker.gguf.architectures import GEMMA2, GEMMA3, SMOLLM3, Architecture
from worker.gguf.write.keys import (
    Facts,
    common,
    pre_norm,
    refused,
    require,
    with_windows,
    without_biases,
)
from worker.layers.rope import RopeConfig
from worker.models import (
    gemma2,
    gemma3,
    glm4,
    granite,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from worker.models.config_fields import FULL, SLIDING, Fields, read_head_shape, read_rope
from worker.models.llama import LlamaConfig
from worker.models.pre_norm import PreNormConfig, one_window, windows_from_layer


def llama_facts(fields: Fields) -> Facts:
    config = LlamaConfig.read(fields)
    require(fields, "hidden_act", "silu")
    return common(
        fields, config.hidden_size, config.attention, config.intermediate_size, config.rope
    )


def mistral_facts(fields: Fields) -> Facts:
    return pre_norm(fields, mistral.read_mistral(fields))


def ministral_facts(fields: Fields) -> Facts:
    return pre_norm(fields, mistral.read_ministral(fields))


def qwen2_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(qwen2.DEFAULTS)
    return pre_norm(fields, PreNormConfig.read(fields, windows_from_layer(fields)))


def qwen3_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(qwen3.DEFAULTS)
    without_biases(fields)
    return pre_norm(fields, PreNormConfig.read(fields, windows_from_layer(fields)))


def smollm3_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(smollm3.DEFAULTS)
    without_biases(fields, "attention_bias", "mlp_bias")
    rotary = smollm3.read_rotary(fields)
    every = SMOLLM3.unrotated_every
    if any(rotates != bool((i + 1) % every) for i, rotates in enumerate(rotary)):
        raise refused(fields, f"its layers do not rotate but for every {every}th")
    windows = smollm3.read_windows(fields, rotary)
    return pre_norm(fields, PreNormConfig.read(fields, windows, theta=2e6))


def granite_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(granite.DEFAULTS)
    without_biases(fields, "attention_bias", "mlp_bias")
    facts = pre_norm(fields, PreNormConfig.read(fields, (None,) * fields.layers()))
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    return facts.adding({key: fields.number(name) for key, name in names.items()})


def phi3_facts(fields: Fields) -> Facts:
    fields = phi3.renamed_longrope(fields.with_defaults(phi3.DEFAULTS))
    config = PreNormConfig.read(fields, one_window(fields), partial=1.0)
    facts = pre_norm(fields, config)
    return Facts(facts.keys, facts.attention, facts.rope, longrope=True)


def glm4_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(glm4.DEFAULTS)
    return pre_norm(fields, PreNormConfig.read(fields, (None,) * fields.layers(), partial=0.5))


def olmo2_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(olmo.DEFAULTS)
    return _olmo(fields, read_rope(fields, read_head_shape(fields).dim))


def olmo3_facts(fields: Fields) -> Facts:
    """llama.cpp does not stretch the positions of sliding layers."""
    fields = fields.with_defaults(olmo.OLMO3_DEFAULTS)
    full, sliding = olmo.read_ropes(fields, read_head_shape(fields).dim)
    if sliding.kind != "default" or sliding.theta != full.theta:
        raise refused(fields, "its sliding layers have another rope_theta or a rope_type")
    windows = olmo.read_windows(fields)
    keys = {
        "attention.sliding_window": fields.integer("sliding_window"),
        "attention.sliding_window_pattern": [window is not None for window in windows],
    }
    return _olmo(fields, full).adding(keys)


def _olmo(fields: Fields, rope: RopeConfig) -> Facts:
    without_biases(fields)
    require(fields, "hidden_act", "silu")
    hidden, inner = fields.integer("hidden_size"), fields.integer("intermediate_size")
    return common(fields, hidden, read_head_shape(fields), inner, rope)


def gemma2_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(gemma2.DEFAULTS)
    without_biases(fields)
    require(fields, "hidden_activation", "gelu_pytorch_tanh")
    with_windows(fields, gemma2.read_windows(fields), GEMMA2)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    for name in caps:
        if not fields.number(name, 0.0):
            raise refused(fields, f"{name} is null")
    attention = read_head_shape(fields)
    _require_scale(fields, attention.dim, GEMMA2)
    facts = common(
        fields,
        fields.integer("hidden_size"),
        attention,
        fields.integer("intermediate_size"),
        read_rope(fields, attention.dim),
    )
    return facts.adding(
        {
            "attention.sliding_window": fields.integer("sliding_window"),
            **{name: fields.number(name) for name in caps},
        }
    )


def gemma3_facts(fields: Fields) -> Facts:
    config = gemma3.Gemma3Config.read(fields)
    fields = fields.with_defaults({**gemma3.DEFAULTS, "query_pre_attn_scalar": 256})
    without_biases(fields)
    require(fields, "hidden_activation", "gelu_pytorch_tanh")
    _require_scale(fields, config.attention.dim, GEMMA3)
    facts = common(
        fields,
        config.hidden_size,
        config.attention,
        config.intermediate_size,
        config.ropes[FULL],
    )
    keys = {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_kinds],
        "rope.freq_base_swa": float(config.ropes[SLIDING].theta),
    }
    if config.final_logit_softcapping is not None:
        keys["final_logit_softcapping"] = float(config.final_logit_softcapping)
    return facts.adding(keys)


def _require_scale(fields: Fields, dim: int, architecture: Architecture) -> None:
    """The scale of attention scores, which depends on the number of layers in llama.cpp."""
    if fields.layers() == architecture.largest:
        dim = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    if fields.number("query_pre_attn_scalar") != dim:
        raise refused(fields, f"query_pre_attn_scalar is not {dim}")
