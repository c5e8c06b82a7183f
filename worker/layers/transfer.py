"""The border between the host and the device of a model: which branches a device takes, copies to
it, and values read back from it. A step crosses it here only; `read_back` and `read_together` wait
for the device, and nothing else does.
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
    """Numbers of the host as a tensor [len(values)]: built on the host, then copied. A copy to a
    GPU waits for nothing: its source is pinned, and kept until it is done."""
    on_gpu = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=on_gpu).to(device, non_blocking=on_gpu)


def take(values: Tensor, rows: Sequence[int]) -> Tensor:
    """values [n, ...] → the rows of these numbers [len(rows), ...]. A list as an index would be a
    copy that waits for the device."""
    if len(rows) == len(values) and all(at == row for at, row in enumerate(rows)):
        return values
    return values.index_select(0, to_device(rows, values.device, torch.long))


def read_back(values: Tensor) -> Any:
    """The values as nested lists of Python numbers, or as one number if there is no dimension."""
    return values.tolist()


def read_together(*tensors: Tensor) -> list[Any]:
    """`read_back` of each, with one wait for the device. Integers are below 2^53."""
    if not tensors or not is_accelerator(tensors[0].device):
        return [values.tolist() for values in tensors]
    host = torch.cat([values.flatten().double() for values in tensors]).cpu()
    parts = host.split([values.numel() for values in tensors])
    return [
        part.to(values.dtype).view(values.shape).tolist()
        for part, values in zip(parts, tensors, strict=True)
    ]
