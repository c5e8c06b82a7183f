"""Records the kernel calls of a computation, so that the same calls can be made again.

In a small step most time goes into the Python that allocates tensors, looks up addresses and
converts arguments. Recorded calls are made again by one foreign call, and read and write the same
memory as the first time.
"""

from __future__ import annotations

import struct
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Array, addressof, c_float
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from worker.kernels import elementwise, library
from worker.kernels.library import PARAMETERS, Library

aten = torch.ops.aten
ALLOCATIONS = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}
SUMS = {aten.add.Tensor, aten.add_.Tensor}
PRODUCTS = {aten.mul.Tensor}
GATHERS = {aten.embedding.default, aten.index_select.default}
ALIGNMENT = 64  # bytes
CHUNK_BYTES = 1 << 22


class Program:
    """Kernel calls one after the other. `words`: of each its kernel, their number, and its
    arguments."""

    def __init__(self) -> None:
        self.words = array("q")
        self._tables: list[Array[Any]] = []  # arguments that calls point to

    def add(self, name: str, args: Iterable[Any]) -> int:
        """Append a call. Returns where its arguments begin in `words`."""
        kernel, kinds = library.require().from_words[name], PARAMETERS[name]
        self.words.extend((kernel, len(kinds)))
        first = len(self.words)
        self.words.extend(self._word(kind, arg) for kind, arg in zip(kinds, args, strict=True))
        return first

    def __call__(self) -> None:
        address, words = self.words.buffer_info()
        library.require().call_all(address, words)

    def _word(self, kind: type, arg: Any) -> int:
        if kind is c_float:
            (word,) = struct.unpack("<q", struct.pack("<fi", arg, 0))
            return int(word)
        if isinstance(arg, Array):
            self._tables.append(arg)
            return addressof(arg)
        return 0 if arg is None else int(arg)


class Arena:
    """Memory for the tensors of recordings. They share it: only one is computed at a time. The
    memory of a tensor that is gone serves the next one of its size, since calls are made again in
    their order: a step takes as much as it holds at a time, and finds it in the caches."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._index, self._used = 0, 0  # the chunk that is used now, and the bytes used of it
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)  # by size

    @property
    def held(self) -> int:
        """Bytes of the last recording that tensors have had at a time."""
        return sum(chunk.nbytes for chunk in self._chunks[: self._index]) + self._used

    def restart(self) -> None:
        """The next tensors are those of another recording."""
        self._index = self._used = 0
        self._free = defaultdict(list)  # tensors of earlier recordings are not put back here

    def empty_like(self, x: Tensor) -> Tensor:
        """A contiguous tensor with the shape and dtype of x."""
        size = -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        memory = free.pop() if free else self._new(size)
        held = memory[: x.nbytes]  # as long as a tensor refers to it
        weakref.finalize(held, free.append, memory).atexit = False
        return torch.from_numpy(held).view(x.dtype).view(x.shape)

    def _new(self, size: int) -> NDArray[np.uint8]:
        while self._index < len(self._chunks):
            if self._used + size <= self._chunks[self._index].nbytes:
                break
            self._index, self._used = self._index + 1, 0
        else:
            self._chunks.append(torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8))
        start, self._used = self._used, self._used + size
        memory: NDArray[np.uint8] = self._chunks[self._index].numpy()
        return memory[start : self._used]


class Recording(TorchDispatchMode):
    """The calls that were made while it was active, in their order: `program`. `refused` names an
    operation of torch that can't be made again into the same memory; the calls are void then."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program = Program()
        self.attention: list[int] = []  # where the arguments of calls of attend_decode begin
        self.refused: str | None = None
        self._arena = arena
        arena.restart()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch puts a wrapper around __torch_dispatch__ that imports its compiler: a second of
        # the first step that is recorded.
        return False

    def note(self, name: str, args: Iterable[Any]) -> None:
        """A kernel is called."""
        first = self.program.add(name, args)
        if name == "attend_decode":
            self.attention.append(first)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and func in SUMS and _is_sum(*args):
            out = args[0] if func is aten.add_.Tensor else self._arena.empty_like(args[0])
            elementwise.add_into(out, *args)
            return out
        if not kwargs and func is aten.add.Tensor and _is_integer_sum(*args):
            out = self._arena.empty_like(args[0])
            elementwise.add_number_into(out, *args)
            return out
        if not kwargs and func in PRODUCTS and _is_scaling(*args):
            out = self._arena.empty_like(args[0])
            elementwise.multiply_into(out, *args)
            return out
        out = func(*args, **(kwargs or {}))
        if not kwargs and func in GATHERS:
            table, numbers = args[0], args[-1]
            if _is_gather(table, numbers, args[1:-1]):
                out = self._arena.empty_like(out)
                elementwise.gather_into(out, table, numbers)
                return out
        if not kwargs and func is aten.cat.default and _is_joining(*args):
            out = self._arena.empty_like(out)
            elementwise.join_into(out, args[0])
            return out
        if func in ALLOCATIONS:
            return self._arena.empty_like(out)
        if not _is_view(func, out, args):
            self.refused = self.refused or str(func)
        return out


def _is_sum(a: Tensor, b: Any) -> bool:
    """True if the kernels can add b to a."""
    return (
        isinstance(b, Tensor)
        and library.serves(a)
        and a.dtype is b.dtype
        and b.shape in (a.shape, a.shape[-1:])
        and a.is_contiguous()
        and b.is_contiguous()
    )


def _is_integer_sum(x: Tensor, number: Any) -> bool:
    """True if the kernels can add a number to x."""
    return isinstance(number, int) and x.is_cpu and x.dtype is torch.int64 and x.is_contiguous()


def _is_scaling(x: Any, factor: Any) -> bool:
    """True if the kernels can multiply x by a number."""
    return isinstance(factor, float) and library.serves(x) and x.is_contiguous()


def _is_joining(parts: Sequence[Tensor], dimension: int = 0) -> bool:
    """True if the kernels put the parts side by side."""
    return dimension == 1 and all(
        library.serves(part)
        and part.dtype is parts[0].dtype
        and part.dim() == 2
        and part.stride(1) == 1
        for part in parts
    )


def _is_gather(table: Tensor, numbers: Tensor, dimension: tuple[int, ...]) -> bool:
    """True if the kernels can gather rows of the table by their numbers."""
    return (
        not any(dimension)
        and table.is_cpu
        and type(table) is Tensor
        and table.is_contiguous()
        and numbers.dtype is torch.int64
        and numbers.is_contiguous()
    )


def _is_view(func: Any, out: Any, args: Sequence[Any]) -> bool:
    """True if an operation has only returned views of its first argument. Some copy if they must,
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
        self.from_words = kernels.from_words
        for name in PARAMETERS:
            setattr(self, name, _noted(getattr(kernels, name), name, recording))


def _noted(function: Callable[..., None], name: str, recording: Recording) -> Callable[..., None]:
    def call(*args: Any) -> None:
        recording.note(name, args)
        function(*args)

    return call


@contextmanager
def record(arena: Arena) -> Iterator[Recording]:
    """Record what this thread computes. The tensors that it allocates are in `arena`."""
    recording = Recording(arena)
    with library.replaced(_Recorded(library.require(), recording)), recording:
        yield recording
