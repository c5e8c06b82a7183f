"""The border between the host and the device of a model: which branches a device takes, copies to
it, and values read back from it. A step crosses it here only; `read_back`, `read_together` and
`Reading.values` wait for the device, and nothing else does.
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


class Reading:
    """Tensors of one device on their way to the host, as they are now. Integers are below 2^53."""

    def __init__(self, *tensors: Tensor) -> None:
        self._forms = [(one.dtype, one.shape, one.numel()) for one in tensors]
        self._tensors: Sequence[Tensor] = tensors
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        if not tensors or not is_accelerator(tensors[0].device):
            return
        whole = torch.cat([values.flatten().double() for values in tensors])
        self._tensors = ()
        if not whole.is_cuda:
            self._host = whole.cpu()
            return
        self._host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        self._host.copy_(whole, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(whole.device))

    def values(self) -> list[Any]:
        """`read_back` of each. Waits for what the device has to do up to here, and not for what it
        was given since."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._host is None:
            return [one.tolist() for one in self._tensors]
        parts = self._host.split([number for _, _, number in self._forms])
        return [
            part.to(dtype).view(shape).tolist()
            for part, (dtype, shape, _) in zip(parts, self._forms, strict=True)
        ]


def read_together(*tensors: Tensor) -> list[Any]:
    """`read_back` of each, with one wait for the device. Integers are below 2^53."""
    return Reading(*tensors).values()
