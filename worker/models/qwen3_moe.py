"""Qwen3-MoE (Qwen3 technical report, 2025): Qwen3 with sparse layers, dense ones mixed in."""

from __future__ import annotations

from dataclasses import dataclass

from worker.layers.experts import SparseMLP
from worker.layers.mlp import ACTIVATIONS, Activation, GatedMLP
from worker.layers.rope import Rope
from worker.layers.self_attention import SelfAttention
from worker.models.fields import MAX_EXPERTS, Fields
from worker.models.model import Decoder, FeedForward, Placement, PreNormLayer
from worker.models.qwen3 import Qwen3Config

# What a config.json may leave out, as transformers fills it in.
DEFAULTS = {
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


@dataclass(frozen=True)
class ExpertsConfig:
    """The fields of the mixture; layer i is sparse iff `sparse[i]`."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int
    hidden_act: Activation
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, fields: Fields) -> ExpertsConfig:
        # transformers 5 writes num_local_experts
        experts = fields.integer(
            "num_local_experts",
            fields.integer("num_experts", minimum=0, maximum=MAX_EXPERTS),
            minimum=0,
            maximum=MAX_EXPERTS,
        )
        step = fields.integer("decoder_sparse_step", 1)
        dense = {int(layer) for layer in fields.numbers("mlp_only_layers", [])}
        top_k = fields.integer("num_experts_per_tok")
        if experts and top_k > experts:
            raise fields.error(f"num_experts_per_tok {top_k} of {experts} experts")
        return cls(
            num_experts=experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=fields.integer("moe_intermediate_size"),
            norm_topk_prob=fields.boolean("norm_topk_prob"),
            shared_expert_intermediate_size=fields.integer(
                "shared_expert_intermediate_size", 0, minimum=0
            ),
            hidden_act=fields.choice("hidden_act", ACTIVATIONS, "silu"),
            sparse=tuple(
                i not in dense and experts > 0 and (i + 1) % step == 0
                for i in range(fields.layers())
            ),
        )

    def sparse_mlp(self, hidden: int, place: Placement) -> SparseMLP:
        return SparseMLP(
            hidden,
            self.moe_intermediate_size,
            place.linear,
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            normalise=self.norm_topk_prob,
            act=self.hidden_act,
            shared_inner=self.shared_expert_intermediate_size,
        )


def qwen3_moe(fields: Fields, tied: bool, place: Placement) -> Decoder:
    """Qwen3-MoE, its weights still empty."""
    # All layers slide where sliding windows are switched on; there are no layer_types here, nor a
    # shared expert.
    fixed = {"layer_types": None, "max_window_layers": 0, "shared_expert_intermediate_size": 0}
    fields = Fields({**DEFAULTS, **fields.values, **fixed}, fields.where)
    config, mixture = Qwen3Config.read(fields), ExpertsConfig.read(fields)
    make, norm = place.linear, place.norm(config.rms_norm_eps)
    rope = Rope(config.rope, place.dtype, place.device)
    hidden = config.hidden_size

    def layer(index: int, window: int | None) -> PreNormLayer:
        mlp: FeedForward = (
            mixture.sparse_mlp(hidden, place)
            if mixture.sparse[index]
            else GatedMLP(hidden, config.intermediate_size, make, act=config.hidden_act)
        )
        return PreNormLayer(
            input_norm=norm(hidden),
            mixer=SelfAttention(
                hidden, config.attention, make, bias=config.attention_bias, norm=norm
            ),
            post_norm=norm(hidden),
            mlp=mlp,
            rope=rope,
            make_cache=lambda: place.kv_cache(config.attention, window),
        )

    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        layers=[layer(index, window) for index, window in enumerate(config.windows)],
        norm=norm(hidden),
        tied=tied,
        context_length=config.rope.context,
        place=place,
    )
