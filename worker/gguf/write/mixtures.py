"""Mixtures of experts and hybrids with delta nets: what their GGUF files say. Each function raises
JobError for a model that files of its architecture cannot state."""

from __future__ import annotations

from dataclasses import replace

from worker.gguf.architectures import (
    GPT_OSS,
    LLAMA,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
    Architecture,
)
from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.write.keys import (
    Facts,
    Keys,
    common,
    pre_norm,
    refused,
    require,
    with_windows,
    without_biases,
)
from worker.models import gpt_oss, mixtral, qwen2_moe, qwen3_5, qwen3_moe, qwen3_next
from worker.models.config_fields import FULL, Fields
from worker.models.hybrid import HybridConfig
from worker.models.mixture import ExpertsConfig
from worker.models.pre_norm import PreNormConfig, windows_from_layer


def mixtral_facts(fields: Fields) -> Facts:
    fields = mixtral.with_fixed(fields)
    keys = _experts(fields, LLAMA)
    del keys["expert_feed_forward_length"]  # it is that of a dense layer
    return pre_norm(fields, mixtral.read_config(fields)).adding(keys)


def qwen2_moe_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(qwen2_moe.DEFAULTS)
    if not fields.boolean("qkv_bias", True):
        raise refused(fields, "qkv_bias is false")
    config = PreNormConfig.read(fields, qwen2_moe.read_windows(fields))
    return pre_norm(fields, config).adding(_experts(fields, QWEN2_MOE))


def qwen3_moe_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(qwen3_moe.DEFAULTS)
    fields = fields.with_defaults({"shared_expert_intermediate_size": 0})
    without_biases(fields)
    config = PreNormConfig.read(fields, windows_from_layer(fields))
    return pre_norm(fields, config).adding(_experts(fields, QWEN3_MOE))


def gpt_oss_facts(fields: Fields) -> Facts:
    """llama.cpp rounds the bounds of yarn to whole channels, whatever truncate says."""
    fields = gpt_oss.with_fixed(fields)
    config = gpt_oss.read_config(fields)
    with_windows(fields, config.windows, GPT_OSS)
    if not config.attention_bias:
        raise refused(fields, "attention_bias is false")
    for name, value in (("swiglu_alpha", gpt_oss.SLOPE), ("swiglu_limit", gpt_oss.LIMIT)):
        if fields.number(name, value, or_zero=True) != value:
            raise refused(fields, f"{name} is not {value}")
    scaling = {name: value for name, value in config.rope.scaling.items() if name != "truncate"}
    facts = common(
        fields,
        config.hidden_size,
        config.attention,
        config.intermediate_size,
        replace(config.rope, scaling=scaling),
    )
    window = {"attention.sliding_window": fields.integer("sliding_window")}
    return facts.adding(_experts(fields, GPT_OSS) | window)


def qwen3_next_facts(fields: Fields) -> Facts:
    fields = fields.with_defaults(qwen3_next.DEFAULTS)
    return _hybrid(fields, QWEN3_NEXT).adding(_experts(fields, QWEN3_NEXT))


def qwen3_5_facts(fields: Fields) -> Facts:
    return _hybrid(fields.with_defaults(qwen3_5.DENSE_DEFAULTS), QWEN35)


def qwen3_5_moe_facts(fields: Fields) -> Facts:
    fields = qwen3_5.with_fixed(fields)
    return _hybrid(fields, QWEN35_MOE).adding(_experts(fields, QWEN35_MOE))


def _experts(fields: Fields, architecture: Architecture) -> Keys:
    mixture = ExpertsConfig.read(fields)
    if mixture.norm_topk_prob != architecture.normalised:
        raise refused(fields, f"norm_topk_prob is {str(mixture.norm_topk_prob).lower()}")
    if not all(mixture.sparse):
        raise refused(fields, "not all of its layers have experts")
    shared = architecture.shared_expert
    if bool(mixture.shared_expert_intermediate_size) != shared:
        raise refused(fields, f"it has {'no' if shared else 'a'} shared expert")
    keys = {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.num_experts_per_tok,
        "expert_feed_forward_length": mixture.moe_intermediate_size,
    }
    if shared:
        keys["expert_shared_feed_forward_length"] = mixture.shared_expert_intermediate_size
    return keys


def _hybrid(fields: Fields, architecture: Architecture) -> Facts:
    without_biases(fields)
    require(fields, "hidden_act", "silu")
    config = HybridConfig.read(fields)
    interval = fields.integer("full_attention_interval", architecture.full_every)
    plan = [(i + 1) % interval == 0 for i in range(fields.layers())]
    if [kind == FULL for kind in config.layer_kinds] != plan:
        raise refused(fields, f"its layers are not delta nets but for every {interval}th")
    delta, rope = config.delta, config.rope
    if delta.key_dim != delta.value_dim:
        raise refused(fields, "linear_key_head_dim and linear_value_head_dim differ")
    inner = fields.integer("intermediate_size", fields.integer("moe_intermediate_size"))
    facts = common(fields, config.hidden_size, config.attention, inner, rope)
    keys: Keys = {
        "ssm.conv_kernel": delta.kernel,
        "ssm.state_size": delta.key_dim,
        "ssm.group_count": delta.key_heads,
        "ssm.time_step_rank": delta.value_heads,
        "ssm.inner_size": delta.values,
        "full_attention_interval": interval,
    }
    if architecture.tiled:  # positions of images, which text has none of
        given = rope.scaling.get("mrope_section")
        pairs = rope.dim // 2
        rest = pairs - 2 * (pairs // 3)
        sections = given if isinstance(given, list) else [rest, pairs // 3, pairs // 3]
        keys["rope.dimension_sections"] = [*sections, 0][:4]
    rows = DeltaNetRows(
        delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, architecture.tiled
    )
    return replace(facts.adding(keys), delta=rows)
