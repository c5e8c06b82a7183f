"""An accelerator without values, for tests on machines that have none: tensors on torch's `meta`
device under FakeTensorMode have shapes, dtypes and devices only.

`FakeTensorMode` raises where most operations get tensors of two devices, and where a value is read.
`Guard` raises for the other ways in which a host tensor meets one of the device, and for products
of mixed dtypes, which a GPU refuses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worker import Engine
from worker import device as devices
from worker.cache_memory import alone
from worker.checkpoint.safetensors_files import SafetensorsCheckpoint
from worker.device import Device
from worker.engine.engine import EngineCore
from worker.engine.slots import Slots
from worker.layers import transfer as border
from worker.loading.load import load
from worker.model_spec import ModelSpec

DEVICE = torch.device("meta")
ROOMS = (
    "worker.engine.",
    "worker.sampling.",
    "worker.speculative.",
)  # whose modules read values back
COPIES = {"aten::_to_copy"}  # the operations that may take a tensor from one device to another
# Products and writes whose floating-point tensors have one dtype.
ONE_DTYPE = {
    "_grouped_mm",
    "addmm",
    "baddbmm",
    "bmm",
    "index_copy_",
    "index_put_",
    "linalg_solve_triangular",
    "linear",
    "matmul",
    "mm",
    "rms_norm",
    "scaled_dot_product_attention",
}


class Guard(TorchDispatchMode):
    """Checks devices and dtypes of every operation's tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func._schema.name
        # A number on the host may meet a tensor of the device: torch passes it to the kernel.
        places = {tensor.device for tensor in tensors if tensor.dim() or tensor.device == DEVICE}
        if len(places) > 1 and name not in COPIES:
            raise AssertionError(f"{name}: tensors of the devices {sorted(map(str, places))}")
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if len(dtypes) > 1 and name.removeprefix("aten::") in ONE_DTYPE:
            raise AssertionError(f"{name}: tensors of the dtypes {sorted(map(str, dtypes))}")
        return func(*args, **kwargs)


class Answers:
    """Stands in for `read_back` and, as `together` and `reading`, for `read_together` and
    `Reading`: the host's answers for values that do not exist. Counts calls."""

    def __init__(self) -> None:
        self.true, self.calls = True, 0

    def __call__(self, values: Tensor) -> Any:
        assert values.device == DEVICE, "a value of the host is read back"
        self.calls += 1
        one = self.true if values.dtype is torch.bool else -0.5 if values.is_floating_point() else 1
        return _filled(list(values.shape), one)

    def together(self, *values: Tensor) -> list[Any]:
        calls = self.calls
        found = [self(one) for one in values]
        self.calls = calls + 1
        return found

    def reading(self, *values: Tensor) -> Any:
        return SimpleNamespace(values=partial(self.together, *values))


def _filled(shape: list[int], value: float) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value


def answer(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Replace what reads values back in the modules of ROOMS. In layers it stays, and
    raises: a forward pass reads nothing."""
    answers = Answers()
    replaced = {
        "read_back": (border.read_back, answers),
        "read_together": (border.read_together, answers.together),
        "Reading": (border.Reading, answers.reading),
    }
    for name, module in list(sys.modules.items()):
        for function, (original, instead) in replaced.items():
            if name.startswith(ROOMS) and getattr(module, function, None) is original:
                monkeypatch.setattr(module, function, instead)
    return answers


@contextmanager
def fake_device() -> Iterator[None]:
    """Tensors have no values, but for those that a checkpoint reads; they are lost on the way to
    the device."""
    read = SafetensorsCheckpoint.read

    def read_values(files: SafetensorsCheckpoint, name: str) -> Tensor:
        with unset_fake_temporarily():
            return read(files, name)

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(SafetensorsCheckpoint, "read", read_values)
        yield


def load_engine(
    path: Path, dtype: str = "bf16", *, max_batch: int = 4, quantize: str | None = None
) -> Engine:
    """An engine on the device, within `fake_device`. Its failures are raised by `step`."""
    loaded = load(ModelSpec(reference=str(path), dtype=dtype, quantize=quantize), Device(DEVICE))
    core = EngineCore(
        loaded, slots=Slots(max_batch), context=512, share=alone(devices.free_bytes(DEVICE) // 4)
    )
    core._recover = core._pipeline._forgo = _raise  # type: ignore[method-assign]
    return Engine(core)


def _raise(error: BaseException) -> None:
    raise error
