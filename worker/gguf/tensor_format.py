"""Tensors in GGUF files: the types that can be read, which are plain floats and all that the `gguf`
package dequantises, and the names that the reader and the writer look for."""

from __future__ import annotations

import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

DENSE = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
READABLE = (*DENSE, *(kind for kind in quants._type_traits if kind not in DENSE))
READABLE_NAMES = frozenset(kind.name for kind in READABLE)

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Divisors of RoPE's frequencies, one for each pair of channels.
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = (FREQUENCIES, LONG, SHORT)
