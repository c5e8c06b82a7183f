"""Families whose models can be written as GGUF files: the architecture of each, and what changes in
the values of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES
from torch import Tensor

from jobs.errors import JobError
from worker.checkpoint.config import ModelConfig
from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.write import dense, mixtures
from worker.gguf.write.keys import Facts, Keys, rope_keys, rope_tensors
from worker.layers.self_attention import HeadShape
from worker.models.fields import Fields


@dataclass(frozen=True)
class Architecture:
    """`facts` reads a config. `permuted`: rows of queries and keys are stored in pairs of
    neighbours. `norm_offset` is added to the weights of norms."""

    number: MODEL_ARCH
    facts: Callable[[Fields], Facts]
    permuted: bool = False
    norm_offset: float = 0.0

    @property
    def name(self) -> str:
        return MODEL_ARCH_NAMES[self.number]


@dataclass(frozen=True)
class Description:
    """The description of a model in its file."""

    architecture: Architecture
    keys: Keys
    attention: HeadShape
    delta: DeltaNetRows | None
    rope_tensors: dict[str, Tensor]  # factors of frequencies, by their names in the file

    @property
    def experts(self) -> int:
        return int(self.keys.get("expert_count", 0))


def describe(config: ModelConfig) -> Description:
    """Raises JobError for a model that has no form in GGUF files."""
    if config.model_type not in ARCHITECTURES:
        raise JobError(
            "unsupported_model",
            f"models of the family {config.model_type} cannot be quantised; supported: "
            f"{', '.join(ARCHITECTURES)}",
        )
    architecture = ARCHITECTURES[config.model_type]
    facts = architecture.facts(config.fields)
    keys = facts.keys | rope_keys(facts)
    return Description(architecture, keys, facts.attention, facts.delta, rope_tensors(facts.rope))


_GEMMA3 = Architecture(MODEL_ARCH.GEMMA3, dense.gemma3_facts, norm_offset=1.0)
_QWEN35 = Architecture(MODEL_ARCH.QWEN35, mixtures.qwen3_5_facts, norm_offset=1.0)
_QWEN35_MOE = Architecture(MODEL_ARCH.QWEN35MOE, mixtures.qwen3_5_moe_facts, norm_offset=1.0)
ARCHITECTURES: dict[str, Architecture] = {
    "gemma2": Architecture(MODEL_ARCH.GEMMA2, dense.gemma2_facts, norm_offset=1.0),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "glm4": Architecture(MODEL_ARCH.GLM4, dense.glm4_facts),
    "gpt_oss": Architecture(MODEL_ARCH.GPT_OSS, mixtures.gpt_oss_facts),
    "granite": Architecture(MODEL_ARCH.GRANITE, dense.granite_facts, permuted=True),
    "llama": Architecture(MODEL_ARCH.LLAMA, dense.llama_facts, permuted=True),
    "ministral": Architecture(MODEL_ARCH.LLAMA, dense.ministral_facts, permuted=True),
    "mistral": Architecture(MODEL_ARCH.LLAMA, dense.mistral_facts, permuted=True),
    "mixtral": Architecture(MODEL_ARCH.LLAMA, mixtures.mixtral_facts, permuted=True),
    "olmo2": Architecture(MODEL_ARCH.OLMO2, dense.olmo2_facts),
    "olmo3": Architecture(MODEL_ARCH.OLMO2, dense.olmo3_facts),
    "phi3": Architecture(MODEL_ARCH.PHI3, dense.phi3_facts),
    "qwen2": Architecture(MODEL_ARCH.QWEN2, dense.qwen2_facts),
    "qwen2_moe": Architecture(MODEL_ARCH.QWEN2MOE, mixtures.qwen2_moe_facts),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, dense.qwen3_facts),
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35_MOE,
    "qwen3_5_moe_text": _QWEN35_MOE,
    "qwen3_5_text": _QWEN35,
    "qwen3_moe": Architecture(MODEL_ARCH.QWEN3MOE, mixtures.qwen3_moe_facts),
    "qwen3_next": Architecture(MODEL_ARCH.QWEN3NEXT, mixtures.qwen3_next_facts, norm_offset=1.0),
    "smollm3": Architecture(MODEL_ARCH.SMOLLM3, dense.smollm3_facts, permuted=True),
}
