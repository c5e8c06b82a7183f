"""Starts Triton kernels. Triton looks at every argument and option at every start, which takes
longer than most kernels run; what was compiled for arguments of a kind is started here at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

SHORT = range(-(2**31), 2**31)  # integers that kernels take as 32 bits


class Kernel:
    """A Triton function that the host starts: `kernel(grid, *arguments, **constants)`. Its
    parameters are the arguments, then the constants."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, ...], *arguments: Any, warps: int = 4, **constants: Any
    ) -> None:
        values = [constants[name] for name in self.function.arg_names[len(arguments) :]]
        kind = (warps, arguments[0].device, *values, *[_kind(one) for one in arguments])
        compiled = self._compiled.get(kind)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
            return
        compiled = self.function[grid](*arguments, **constants, num_warps=warps)
        if compiled is not None:  # the interpreter compiles nothing
            self._compiled[kind] = compiled


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorates a kernel that the host starts."""
    return Kernel(triton.jit(function))


def kernel_for_any(*names: str) -> Callable[[Callable[..., None]], Kernel]:
    """As `kernel`; what is compiled does not use the values of these arguments."""

    def decorate(function: Callable[..., None]) -> Kernel:
        return Kernel(triton.jit(function, do_not_specialize=names))

    return decorate


def _kind(argument: Any) -> Any:
    """Equal for arguments for which Triton compiles the same code: it uses that integers are 1,
    divisible by 16 or short, and that addresses are divisible by 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15 == 0
    if type(argument) is int:
        return 1 if argument == 1 else (argument & 15 == 0, argument in SHORT)
    return type(argument)
