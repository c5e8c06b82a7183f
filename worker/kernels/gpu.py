"""The Triton kernels of GPUs: whether they can be started, and which tensors they read."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_HEAD = 256  # channels of a head, of which blocks fit in shared memory
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cache
def usable() -> bool:
    """True if the package `triton` can be imported and can start kernels. Before its first kernel
    it compiles a module for that with a C compiler: without one, torch computes."""
    try:
        triton = import_module("triton")
    except ImportError as error:
        logger.warning(
            "on GPUs torch computes alone, because triton can't be imported (%s): steps take "
            "several times as long, and each product dequantises its weight first",
            error,
        )
        return False
    if triton.knobs.runtime.interpret:
        return True
    try:
        _ = triton.runtime.driver.active.utils
    except Exception as error:
        logger.warning(
            "on GPUs torch computes alone, because Triton can't start kernels (%s): steps take "
            "several times as long, and each product dequantises its weight first; Triton needs a "
            "C compiler with Python's headers (apt-get install gcc python3-dev), and a folder for "
            "what it compiles, which TRITON_CACHE_DIR names",
            " ".join(str(error).split()),
        )
        return False
    return True


def serves(x: Tensor) -> bool:
    """True if kernels read `x`."""
    return x.is_cuda and x.dtype in DTYPES and usable()


def attention() -> Any:
    """`worker.kernels.triton_attention`, where `serves` has been checked."""
    return import_module("worker.kernels.triton_attention")


def elementwise() -> Any:
    """`worker.kernels.triton_elementwise`, where `serves` has been checked."""
    return import_module("worker.kernels.triton_elementwise")


def mixture() -> Any:
    """`worker.kernels.triton_mixture`, where `serves` has been checked."""
    return import_module("worker.kernels.triton_mixture")


def delta_net() -> Any:
    """`worker.kernels.triton_delta_net`, where `serves` has been checked."""
    return import_module("worker.kernels.triton_delta_net")


def sampling() -> Any:
    """`worker.kernels.triton_sampling`, where `serves` has been checked."""
    return import_module("worker.kernels.triton_sampling")


def multiplies_one_row(weight: Tensor) -> bool:
    """True if a kernel multiplies one row with this weight. In float32 torch does."""
    return serves(weight) and weight.dtype is not torch.float32


def dense() -> Any:
    """`worker.kernels.triton_dense`, where `multiplies_one_row` has been checked."""
    return import_module("worker.kernels.triton_dense")


def products() -> Any:
    """`worker.kernels.triton_products`, where `package` has been checked."""
    return import_module("worker.kernels.triton_products")
