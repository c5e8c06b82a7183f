"""Quantisation of a model's weights while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from jobs.errors import invalid
from worker.layers.weights.quantise import quantise
from worker.layers.weights.quantised_tensor import Weight


@dataclass(frozen=True)
class Compression:
    """Stores matrices in blocks of `kind`."""

    kind: GGMLQuantizationType

    def fits(self, shape: Sequence[int]) -> bool:
        """True if rows of this shape consist of whole blocks."""
        return len(shape) == 2 and shape[-1] % GGML_QUANT_SIZES[self.kind][0] == 0

    def apply(self, tensor: Tensor) -> Weight:
        """Matrices that don't fit are returned as they are."""
        return quantise(tensor, self.kind) if self.fits(tensor.shape) else tensor


COMPRESSIONS = {"q8": Compression(GGMLQuantizationType.Q8_0)}


def compression_of(name: str | None) -> Compression | None:
    """Raises JobError("invalid_request") for an unknown name."""
    if name is not None and name not in COMPRESSIONS:
        raise invalid(f"unknown quantize '{name}'; possible: {', '.join(COMPRESSIONS)}", "quantize")
    return None if name is None else COMPRESSIONS[name]
