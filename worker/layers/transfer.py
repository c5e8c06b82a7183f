"""The border between the host and the device of a model: which branches a device takes, copies to
it, and values read back from it. A step crosses it here only, and each `read_back` waits for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def is_accelerator(device: torch.device) -> bool:
    """True if layers use the layouts and products for GPUs: on all devices but the CPU."""
    return device.type != "cpu"


def to_device(
    values: Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Numbers of the host as a tensor [len(values)]: built on the host, then copied."""
    return torch.tensor(values, dtype=dtype).to(device)


def read_back(values: Tensor) -> Any:
    """The values as nested lists of Python numbers, or as one number if there is no dimension."""
    return values.tolist()
