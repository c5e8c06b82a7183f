"""The tensor types that can be read: plain floats, and all that the `gguf` package dequantises."""

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
NAMES = frozenset(kind.name for kind in READABLE)
