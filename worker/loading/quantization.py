"""FP8 checkpoints: which ones are read, and how their weights are dequantised while loading.

A weight is stored as float8_e4m3 values beside a scale for the whole tensor, for each output
channel or for each block. Two formats are read: fine-grained FP8 (DeepSeek-V3, Qwen3-…-FP8) and the
float schemes of compressed-tensors. Activations are not quantised: their scales are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from jobs.errors import JobError
from worker.models.fields import Fields

FP8 = "F8_E4M3"  # the dtype in safetensors files
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's name; the values multiply in both
# Scales of activations and of a quantised KV cache; older files of compressed-tensors.
IGNORED_SCALES = re.compile(r".*\.(input|output|[qkv]|[qkv]_proj\.output)_scale$")
DEQUANTISED = torch.bfloat16  # the dtype that FP8 weights run in by default
ALTERNATIVE = "use the unquantised checkpoint"


@dataclass(frozen=True)
class Fp8:
    """FP8 weights. `block`: rows and columns that share a scale; None: a whole tensor or row."""

    block: tuple[int, int] | None = None

    def scale_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        """The name of a weight's scale among the tensors of its checkpoint."""
        return next((name + suffix for suffix in SCALES if name + suffix in names), None)

    def is_scale(self, name: str, names: Mapping[str, Any]) -> bool:
        """Whether a tensor is a scale: of another tensor, of activations or of the KV cache."""
        weights = [name.removesuffix(suffix) for suffix in SCALES if name.endswith(suffix)]
        return any(one in names for one in weights) or bool(IGNORED_SCALES.match(name))

    def fits(self, weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        """Whether a scale of this shape belongs to a weight of this shape."""
        if self.block is None and prod(scale) == 1:
            return True
        if len(weight) < 2:
            return False
        *lead, rows, columns = weight
        if self.block is None:
            return scale in ((*lead, rows), (*lead, rows, 1))
        high, wide = self.block
        return scale == (*lead, -(-rows // high), -(-columns // wide))

    def dequantise(self, weight: Tensor, scale: Tensor) -> Tensor:
        """weight [out, in] and its scale → float32 [out, in]."""
        values, scale = weight.float(), scale.float()
        if scale.numel() == 1:
            return values * scale.reshape(())
        if self.block is None:
            return values * scale.reshape(-1, 1)
        rows, columns = weight.shape
        wide = scale.repeat_interleave(self.block[1], 1)[:, :columns]
        return values * wide.repeat_interleave(self.block[0], 0)[:rows]


def read_quantization(fields: Fields) -> Fp8 | None:
    """The quantisation that a config.json states; None for unquantised weights.

    Raises JobError("unsupported_model") for every other method.
    """
    if fields.values.get("quantization") is not None and not fields.values.get(
        "quantization_config"
    ):
        raise _unsupported(fields, "quantization (MLX)")
    given = fields.inner("quantization_config")
    if given is None:
        return None
    method = given.values.get("quant_method")
    if method == "fp8":
        return _fine_grained(given)
    if method == "compressed-tensors":
        return _compressed(given)
    if method is None:
        kind = "MLX" if {"group_size", "bits"} <= given.values.keys() else "without quant_method"
        raise _unsupported(fields, f"quantization_config ({kind})")
    raise _unsupported(fields, f"quantization_config ({method})")


def _fine_grained(given: Fields) -> Fp8:
    if given.text("fmt", "e4m3") != "e4m3":
        raise _unsupported(given, f"fmt {given.values['fmt']!r}")
    return Fp8(_block(given, "weight_block_size"))


def _compressed(given: Fields) -> Fp8:
    """All groups must hold 8-bit floats, in blocks of one size."""
    groups = given.inner("config_groups")
    blocks: set[tuple[int, int] | None] = set()
    for name in groups.values if groups else ():
        group = groups.inner(name) if groups else None
        weights = group.inner("weights") if group else None
        if weights is None:
            raise given.error(f"config_groups: {name} has no weights")
        kind, bits = weights.text("type", "int"), weights.integer("num_bits", 8)
        if (kind, bits) != ("float", 8) or not weights.boolean("symmetric", True):
            form = given.values.get("format")
            raise _unsupported(given, f"compressed-tensors with {bits}-bit {kind} ({form})")
        strategy = weights.text("strategy", "tensor")
        if strategy not in ("tensor", "channel", "block", "group"):
            raise _unsupported(given, f"compressed-tensors with the strategy {strategy!r}")
        if strategy == "group":
            blocks.add((1, weights.integer("group_size")))
        else:
            blocks.add(_block(weights, "block_structure") if strategy == "block" else None)
    for name in ("sparsity_config", "transform_config"):
        if given.values.get(name):
            raise _unsupported(given, f"compressed-tensors with {name}")
    if len(blocks) != 1:
        raise _unsupported(given, "compressed-tensors with blocks of several sizes")
    return Fp8(blocks.pop())


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block."""
    value = fields.values.get(name)
    if value is None:
        return None
    whole = isinstance(value, list) and all(type(size) is int and size > 0 for size in value)
    if not whole or len(value) != 2:
        raise fields.error(f"field '{name}' must be two positive whole numbers, got {value!r}")
    return value[0], value[1]


def _unsupported(fields: Fields, what: str) -> JobError:
    return fields.error(f"{what} is not supported: {ALTERNATIVE}")
