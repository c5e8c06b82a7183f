"""The floating-point dtypes that models are stored and run in, and their names."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.option_values import BFLOAT16, FLOAT16, FLOAT32


class DType(NamedTuple):
    dtype: torch.dtype
    config: str  # in config.json, without a leading "torch."
    safetensors: str
    options: tuple[str, ...]  # for --dtype; none: a checkpoint's own dtype only


_TABLE = (
    DType(torch.float64, "float64", "F64", ()),
    DType(torch.float32, "float32", "F32", FLOAT32),
    DType(torch.float16, "float16", "F16", FLOAT16),
    DType(torch.bfloat16, "bfloat16", "BF16", BFLOAT16),
)
FROM_CONFIG = {row.config: row.dtype for row in _TABLE}
FROM_SAFETENSORS = {row.safetensors: row.dtype for row in _TABLE}
FROM_OPTION = {name: row.dtype for row in reversed(_TABLE) for name in row.options}


def name_of(dtype: torch.dtype) -> str:
    """torch's name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
