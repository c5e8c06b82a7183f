"""A model as its GGUF file describes it: the architecture, the metadata and the layout of its
tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from jobs.errors import JobError
from worker.checkpoint.config import ModelConfig
from worker.gguf import architectures
from worker.gguf.architectures import Architecture
from worker.gguf.delta_net import DeltaNetRows
from worker.gguf.write import dense, mixtures
from worker.gguf.write.keys import Facts, Keys, rope_keys, rope_tensors
from worker.layers.self_attention import HeadShape
from worker.models.config_fields import Fields

ReadFacts = Callable[[Fields], Facts]


@dataclass(frozen=True)
class Description:
    """`keys`: metadata, without the architecture's prefix."""

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
    if config.model_type not in FAMILIES:
        raise JobError(
            "unsupported_model",
            f"models of the family {config.model_type} cannot be quantised; supported: "
            f"{', '.join(FAMILIES)}",
        )
    architecture, read = FAMILIES[config.model_type]
    facts = read(config.fields)
    keys = facts.keys | rope_keys(facts)
    return Description(architecture, keys, facts.attention, facts.delta, rope_tensors(facts.rope))


# The architecture of each family's files, and the function that reads its config.json.
FAMILIES: dict[str, tuple[Architecture, ReadFacts]] = {
    "gemma2": (architectures.GEMMA2, dense.gemma2_facts),
    "gemma3": (architectures.GEMMA3, dense.gemma3_facts),
    "gemma3_text": (architectures.GEMMA3, dense.gemma3_facts),
    "glm4": (architectures.GLM4, dense.glm4_facts),
    "gpt_oss": (architectures.GPT_OSS, mixtures.gpt_oss_facts),
    "granite": (architectures.GRANITE, dense.granite_facts),
    "llama": (architectures.LLAMA, dense.llama_facts),
    "ministral": (architectures.LLAMA, dense.ministral_facts),
    "mistral": (architectures.LLAMA, dense.mistral_facts),
    "mixtral": (architectures.LLAMA, mixtures.mixtral_facts),
    "olmo2": (architectures.OLMO2, dense.olmo2_facts),
    "olmo3": (architectures.OLMO2, dense.olmo3_facts),
    "phi3": (architectures.PHI3, dense.phi3_facts),
    "qwen2": (architectures.QWEN2, dense.qwen2_facts),
    "qwen2_moe": (architectures.QWEN2_MOE, mixtures.qwen2_moe_facts),
    "qwen3": (architectures.QWEN3, dense.qwen3_facts),
    "qwen3_5": (architectures.QWEN35, mixtures.qwen3_5_facts),
    "qwen3_5_moe": (architectures.QWEN35_MOE, mixtures.qwen3_5_moe_facts),
    "qwen3_5_moe_text": (architectures.QWEN35_MOE, mixtures.qwen3_5_moe_facts),
    "qwen3_5_text": (architectures.QWEN35, mixtures.qwen3_5_facts),
    "qwen3_moe": (architectures.QWEN3_MOE, mixtures.qwen3_moe_facts),
    "qwen3_next": (architectures.QWEN3_NEXT, mixtures.qwen3_next_facts),
    "smollm3": (architectures.SMOLLM3, dense.smollm3_facts),
}
