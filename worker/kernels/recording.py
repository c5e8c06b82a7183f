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
ALIGNMENT = 64  # bytes
CHUNK_BYTES = 1 << 22

Call = tuple[Callable[..., object], tuple[Any, ...]]


class Arena:
    """Memory for the tensors of recordings. They share it: only one is computed at a time."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._index, self._used = 0, 0  # the chunk that is used now, and the bytes used of it

    def restart(self) -> None:
        """The next tensors are those of another recording."""
        self._index = self._used = 0

    def empty_like(self, x: Tensor) -> Tensor:
        """A contiguous tensor with the shape and dtype of x."""
        size = -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        while self._index < len(self._chunks):
            if self._used + size <= self._chunks[self._index].nbytes:
                break
            self._index, self._used = self._index + 1, 0
        else:
            self._chunks.append(torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8))
        start, self._used = self._used, self._used + size
        chunk = self._chunks[self._index]
        return chunk[start : start + x.nbytes].view(x.dtype).view(x.shape)


class Recording(TorchDispatchMode):
    """The calls that were made while it was active, in their order: `calls`. `refused` names an
    operation of torch that can't be made again into the same memory; the calls are void then."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.attention: list[tuple[Any, ...]] = []  # arguments of the calls of attend_decode
        self.refused: str | None = None
        self._arena = arena
        arena.restart()

    def note(self, function: Callable[..., object], name: str, args: Iterable[Any]) -> None:
        """A kernel is called."""
        boxed = [
            arg if isinstance(arg, Array) else kind(arg)
            for kind, arg in zip(PARAMETERS[name], args, strict=True)
        ]
        self.calls.append((function, tuple(boxed)))
        if name == "attend_decode":
            self.attention.append(tuple(boxed))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            return self._arena.empty_like(out)
        if func is aten.add.Tensor and not kwargs:
            out = self._arena.empty_like(out).copy_(out)
            self.calls.append((_add, (*args, out)))
        elif func is aten.add_.Tensor and not kwargs:
            self.calls.append((func, args))
        elif not _is_view(func, out, args):
            self.refused = self.refused or str(func)
        return out


def _add(a: Tensor, b: Any, out: Tensor) -> None:
    torch.add(a, b, out=out)


def _is_view(func: Any, out: Any, args: Sequence[Any]) -> bool:
    """Whether an operation has only returned views of its first argument. Some copy if they must,
    such as `contiguous` and `reshape`."""
    facts = [one.alias_info for one in func._schema.returns]
    if not facts or any(one is None or one.is_write for one in facts):
        return False
    memory = args[0].untyped_storage().data_ptr()
    outs = [out] if isinstance(out, Tensor) else out
    return all(one.untyped_storage().data_ptr() == memory for one in outs)


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
def record(arena: Arena) -> Iterator[Recording]:
    """Record what this thread computes. The tensors that it allocates are in `arena`."""
    recording = Recording(arena)
    with library.replaced(_Recorded(library.require(), recording)), recording:
        yield recording


def call_again(calls: Iterable[Call]) -> None:
    """Make recorded calls again."""
    for function, args in calls:
        function(*args)
