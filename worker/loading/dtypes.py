"""The floating-point dtypes that models are stored and run in, and their names."""

from __future__ import annotations

from typing import NamedTuple

import torch


class DType(NamedTuple):
    dtype: torch.dtype
    config: str  # in config.json, without a leading "torch."
    safetensors: str
    option: str | None  # for --dtype; None: a checkpoint's own dtype only


_TABLE = (
    DType(torch.float64, "float64", "F64", None),
    DType(torch.float32, "float32", "F32", "fp32"),
    DType(torch.float16, "float16", "F16", "fp16"),
    DType(torch.bfloat16, "bfloat16", "BF16", "bf16"),
)
FROM_CONFIG = {row.config: row.dtype for row in _TABLE}
FROM_SAFETENSORS = {row.safetensors: row.dtype for row in _TABLE}
FROM_OPTION = {row.option: row.dtype for row in reversed(_TABLE) if row.option is not None}


def name_of(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
