"""Quantised checkpoints: which ones are read, and how they are dequantised while loading.

FP8: a weight is stored as float8_e4m3 values beside a scale for the whole tensor, for each output
channel or for each block. Two formats are read: fine-grained FP8 (DeepSeek-V3, Qwen3-…-FP8) and the
float schemes of compressed-tensors. Activations are not quantised: their scales are ignored.
MXFP4: the experts of gpt-oss, as 4-bit floats with a power of two for every 32 values.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from jobs.errors import JobError
from worker.checkpoint.dtypes import FROM_SAFETENSORS
from worker.models.config_fields import Fields

FP8 = "F8_E4M3"  # the dtype in safetensors files
SCALES = ("_scale_inv", "_scale")  # suffixes of a weight's name; the values multiply in both
# Scales of activations and of a quantised KV cache; older files of compressed-tensors.
IGNORED_SCALES = re.compile(r".*\.(input|output|[qkv]|[qkv]_proj\.output)_scale$")
BLOCKS, BLOCK_SCALES = "_blocks", "_scales"  # suffixes of the two tensors of an MXFP4 weight
MXFP4_BLOCK = 32  # values that share a scale in MXFP4, two per byte
DEQUANTISED = torch.bfloat16  # the dtype that dequantised weights run in by default
ALTERNATIVE = "use the unquantised checkpoint"


class Quantization(Protocol):
    """A way in which a checkpoint stores weights: a tensor of values and a tensor of scales."""

    name: ClassVar[str]  # for users
    dtype: ClassVar[str]  # of the values in safetensors files
    scale_dtypes: ClassVar[Container[str]]
    transposes: ClassVar[bool]  # rows of the stored values are columns of the weight

    def scale_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        """The name of a tensor's scales among the tensors of its checkpoint."""

    def is_scale(self, name: str, names: Mapping[str, Any]) -> bool:
        """True if a tensor is part of the quantisation: scales of any kind."""

    def fits(self, values: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        """True if scales of this shape belong to values of this shape."""

    def weight_name(self, name: str) -> str:
        """The name that the weight has in an unquantised checkpoint."""

    def weight_shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the weight has in an unquantised checkpoint."""

    def dequantise(self, values: Tensor, scale: Tensor) -> Tensor:
        """One weight, or one part of a stacked weight, in float32."""


@dataclass(frozen=True)
class Fp8:
    """FP8 weights. `block`: rows and columns that share a scale; None: a whole tensor or row."""

    block: tuple[int, int] | None = None
    name: ClassVar[str] = "FP8"
    dtype: ClassVar[str] = FP8
    scale_dtypes: ClassVar[Container[str]] = FROM_SAFETENSORS
    transposes: ClassVar[bool] = False

    def scale_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        return next((name + suffix for suffix in SCALES if name + suffix in names), None)

    def is_scale(self, name: str, names: Mapping[str, Any]) -> bool:
        """Scales of other tensors, of activations and of the KV cache."""
        weights = [name.removesuffix(suffix) for suffix in SCALES if name.endswith(suffix)]
        return any(one in names for one in weights) or bool(IGNORED_SCALES.match(name))

    def fits(self, values: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        if self.block is None and prod(scale) == 1:
            return True
        if len(values) < 2:
            return False
        *lead, rows, columns = values
        if self.block is None:
            return scale in ((*lead, rows), (*lead, rows, 1))
        high, wide = self.block
        return scale == (*lead, -(-rows // high), -(-columns // wide))

    def weight_name(self, name: str) -> str:
        return name

    def weight_shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        return values

    def dequantise(self, values: Tensor, scale: Tensor) -> Tensor:
        """values [out, in] → [out, in]."""
        values, scale = values.float(), scale.float()
        if scale.numel() == 1:
            return values * scale.reshape(())
        if self.block is None:
            return values * scale.reshape(-1, 1)
        rows, columns = values.shape
        wide = scale.repeat_interleave(self.block[1], 1)[:, :columns]
        return values * wide.repeat_interleave(self.block[0], 0)[:rows]


class Mxfp4:
    """Weights of 4-bit floats in blocks of 32, with a scale 2^(e - 127) each (Open Compute Project,
    "OCP Microscaling Formats", 2023).

    Blocks [..., out, in / 32, 16], the first value of a pair in the low bits; scales [..., out,
    in / 32]. As in transformers, the unquantised weight is their transpose, [..., in, out].
    """

    name: ClassVar[str] = "MXFP4"
    dtype: ClassVar[str] = "U8"
    scale_dtypes: ClassVar[Container[str]] = ("U8",)
    transposes: ClassVar[bool] = True

    def scale_of(self, name: str, names: Mapping[str, Any]) -> str | None:
        scale = name.removesuffix(BLOCKS) + BLOCK_SCALES
        return scale if name.endswith(BLOCKS) and scale in names else None

    def is_scale(self, name: str, names: Mapping[str, Any]) -> bool:
        return name.endswith(BLOCK_SCALES) and name.removesuffix(BLOCK_SCALES) + BLOCKS in names

    def fits(self, values: tuple[int, ...], scale: tuple[int, ...]) -> bool:
        return len(values) > 2 and values[-1] == MXFP4_BLOCK // 2 and scale == values[:-1]

    def weight_name(self, name: str) -> str:
        return name.removesuffix(BLOCKS)

    def weight_shape(self, values: tuple[int, ...]) -> tuple[int, ...]:
        *lead, rows, blocks, _ = values
        return (*lead, MXFP4_BLOCK * blocks, rows)

    def dequantise(self, values: Tensor, scale: Tensor) -> Tensor:
        """values [out, in / 32, 16] → [in, out]."""
        pairs = F.embedding(values.int(), _byte_pairs())  # [out, in / 32, 16, 2]
        factors = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
        return (pairs.flatten(-2) * factors[..., None]).flatten(-2).T


@cache
def _byte_pairs() -> Tensor:
    """[256, 2]: the two 4-bit floats (1 sign, 2 exponent, 1 mantissa bit) of every byte."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([positive, -positive])
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)


def read_quantization(fields: Fields) -> Quantization | None:
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
    if method == "mxfp4":
        return Mxfp4()
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
