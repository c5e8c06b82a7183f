"""The architectures of GGUF files: what llama.cpp fixes for each of them.

A config.json could say otherwise. The reader completes a file's metadata by these facts; the writer
refuses a model that differs from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES


@dataclass(frozen=True)
class Architecture:
    """`full_every`: every so many layers, one attends to all tokens, and the others slide.
    `largest`: layers of the model whose scores are scaled by hidden_size / heads instead of the
    size of a head; 0 for none. `unrotated_every`: every so many layers, one has no RoPE."""

    number: MODEL_ARCH
    permuted: bool = False  # rows of queries and keys are in the order of neighbouring pairs
    zero_centred: bool = False  # norms are stored as 1 + w
    tiled: bool = False  # value heads of delta nets are ordered by their place in a group
    full_every: int = 1
    largest: int = 0
    unrotated_every: int = 0
    normalised: bool = True  # the weights of the chosen experts add up to one
    shared_expert: bool = False

    @property
    def name(self) -> str:
        return MODEL_ARCH_NAMES[self.number]


GEMMA2 = Architecture(MODEL_ARCH.GEMMA2, zero_centred=True, full_every=2, largest=46)
GEMMA3 = Architecture(MODEL_ARCH.GEMMA3, zero_centred=True, full_every=6, largest=62)
GLM4 = Architecture(MODEL_ARCH.GLM4)
GPT_OSS = Architecture(MODEL_ARCH.GPT_OSS, full_every=2)
GRANITE = Architecture(MODEL_ARCH.GRANITE, permuted=True)
LLAMA = Architecture(MODEL_ARCH.LLAMA, permuted=True)
OLMO2 = Architecture(MODEL_ARCH.OLMO2, full_every=4)
PHI3 = Architecture(MODEL_ARCH.PHI3)
QWEN2 = Architecture(MODEL_ARCH.QWEN2)
QWEN2_MOE = Architecture(MODEL_ARCH.QWEN2MOE, normalised=False, shared_expert=True)
QWEN3 = Architecture(MODEL_ARCH.QWEN3)
QWEN35 = Architecture(MODEL_ARCH.QWEN35, zero_centred=True, tiled=True, full_every=4)
QWEN35_MOE = Architecture(
    MODEL_ARCH.QWEN35MOE, zero_centred=True, tiled=True, full_every=4, shared_expert=True
)
QWEN3_MOE = Architecture(MODEL_ARCH.QWEN3MOE)
QWEN3_NEXT = Architecture(MODEL_ARCH.QWEN3NEXT, zero_centred=True, full_every=4, shared_expert=True)
SMOLLM3 = Architecture(MODEL_ARCH.SMOLLM3, permuted=True, unrotated_every=4)
