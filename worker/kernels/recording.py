"""Records the kernel calls of a computation, so that the same calls can be made again.

A call through ctypes costs little; what costs is the Python around it that allocates tensors and
looks up addresses. Made again, the calls read and write the same memory as the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Array
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.kernels import library
from worker.kernels.library import PARAMETERS, Library

aten = torch.ops.aten
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}

Call = tuple[Callable[..., object], tuple[Any, ...]]


class Recording(TorchDispatchMode):
    """The calls that were made while it was active, in their order: `calls`. `refused` names an
    operation of torch that can't be made again into the same memory; the calls are void then."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.refused: str | None = None
        self._alive: list[Any] = []  # the memory of the calls

    def note(self, function: Callable[..., object], name: str, args: Iterable[Any]) -> None:
        """A kernel is called."""
        boxed = [
            arg if isinstance(arg, Array) else kind(arg)
            for kind, arg in zip(PARAMETERS[name], args, strict=True)
        ]
        self.calls.append((function, tuple(boxed)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self._alive.append(out)
        if func is aten.add.Tensor and not kwargs and isinstance(args[1], Tensor):
            self.calls.append((_add, (*args, out)))
        elif func is aten.add_.Tensor and not kwargs:
            self.calls.append((Tensor.add_, args))
        elif func not in ALLOCATIONS and not _is_view(func, out, args):
            self.refused = self.refused or str(func)
        return out


def _is_view(func: Any, out: Any, args: Sequence[Any]) -> bool:
    """Whether an operation has only returned views of its first argument. Some copy if they must,
    such as `contiguous` and `reshape`."""
    facts = [one.alias_info for one in func._schema.returns]
    if not facts or any(one is None or one.is_write for one in facts):
        return False
    memory = args[0].untyped_storage().data_ptr()
    outs = [out] if isinstance(out, Tensor) else out
    return all(one.untyped_storage().data_ptr() == memory for one in outs)


def _add(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


class _Recorded(Library):
    """The kernels, each call of which is noted before it is made."""

    def __init__(self, kernels: Library, recording: Recording) -> None:
        self.level, self.packed_bytes = kernels.level, kernels.packed_bytes
        for name in PARAMETERS:
            setattr(self, name, _noted(getattr(kernels, name), name, recording))


def _noted(function: Callable[..., None], name: str, recording: Recording) -> Callable[..., None]:
    def call(*args: Any) -> None:
        recording.note(function, name, args)
        function(*args)

    return call


@contextmanager
def record() -> Iterator[Recording]:
    """Record what this thread computes."""
    recording = Recording()
    with library.replaced(_Recorded(library.require(), recording)), recording:
        yield recording


def call_again(calls: Iterable[Call]) -> None:
    """Make recorded calls again."""
    for function, args in calls:
        function(*args)
