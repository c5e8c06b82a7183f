"""RoPE fields of a config.json, from a file's metadata and its tensors of frequency factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from worker.gguf.read.metadata import Metadata
from worker.gguf.tensor_format import FREQUENCIES, LONG, SHORT

ReadFactors = Callable[[str], list[float] | None]  # the values of a tensor, None if it is absent


def rope_fields(metadata: Metadata, factors: ReadFactors) -> dict[str, Any]:
    """rope_theta, and rope_scaling if the file stretches the positions."""
    fields: dict[str, Any] = {"rope_theta": metadata.scale("rope.freq_base", 10_000.0)}
    scaling = _scaling(metadata, factors)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    return fields


def partial_factor(metadata: Metadata, head_dim: int) -> float:
    """partial_rotary_factor: the share of rope.dimension_count in a head."""
    rotated = metadata.size("rope.dimension_count", head_dim)
    share = rotated / head_dim
    # The product with head_dim is rounded down to whole channels.
    return share if int(head_dim * share) == rotated else math.nextafter(share, math.inf)


def require_all_rotated(metadata: Metadata, head_dim: int) -> None:
    rotated = metadata.size("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise metadata.error(
            f"{metadata.key('rope.dimension_count')} is {rotated} and a head has {head_dim} "
            f"channels: {metadata.architecture} models rotate all of them"
        )


def _scaling(metadata: Metadata, factors: ReadFactors) -> dict[str, Any] | None:
    """Precedence as in llama.cpp: tensors of factors, then rope.scaling.type."""
    original = metadata.size(
        "rope.scaling.original_context_length", metadata.size("context_length")
    )
    attention = metadata.scale("rope.scaling.attn_factor", 1.0)
    short, long = factors(SHORT), factors(LONG)
    if short is not None and long is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": attention,
        }
    divisors = factors(FREQUENCIES)
    if divisors is not None:  # llama3's scaling, computed when the file was written
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
        }
    old = metadata.scale("rope.scale_linear", 0.0)
    factor = metadata.scale("rope.scaling.factor", old)
    kind = metadata.text(metadata.key("rope.scaling.type"), "linear")
    if kind not in ("none", "linear", "yarn"):
        raise metadata.error(
            f"unsupported {metadata.key('rope.scaling.type')} {kind!r}; supported: none, linear, "
            "yarn, and longrope with tensors of factors"
        )
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": metadata.scale("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": metadata.scale("rope.scaling.yarn_beta_slow", 1.0),
    }
    if attention != 1.0:
        scaling["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return scaling
