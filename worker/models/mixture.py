"""The config fields and the sparse MLP of families with a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from worker.layers.experts import SparseMLP
from worker.layers.mlp import ACTIVATIONS, Activation
from worker.models.config_fields import MAX_EXPERTS, Fields
from worker.models.model import Placement

# Checkpoints may stack all experts of a layer in one tensor per projection, as Qwen3.5-MoE is
# published: [experts, 2 * inner, hidden] and [experts, hidden, inner]. Tensor → parts of its rows.
STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# The fields of families without dense layers and without a shared expert.
ALL_SPARSE: dict[str, Any] = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 0,
}


@dataclass(frozen=True)
class ExpertsConfig:
    """The fields of a mixture. Layer i is sparse if `sparse[i]`."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    shared_expert_intermediate_size: int
    hidden_act: Activation
    sparse: tuple[bool, ...]

    @classmethod
    def read(cls, fields: Fields) -> ExpertsConfig:
        # transformers 5 writes num_local_experts.
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
            raise fields.error(f"num_experts_per_tok {top_k} exceeds the {experts} experts")
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
        """The MLP of a sparse layer."""
        return SparseMLP(
            hidden,
            self.moe_intermediate_size,
            place.linears,
            experts=self.num_experts,
            top_k=self.num_experts_per_tok,
            normalise=self.norm_topk_prob,
            act=self.hidden_act,
            stacked=STACKED_EXPERTS,
            shared_inner=self.shared_expert_intermediate_size,
        )
