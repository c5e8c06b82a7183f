"""The line of the user's code that a warning about a request names.

It is the innermost frame outside this package, pydantic and asyncio. Work in another thread has no
such frame: `run_in_thread` hands the line over.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent import futures
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pydantic

T = TypeVar("T")
R = TypeVar("R")

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = [Path(module.__path__[0]) for module in (pydantic, asyncio, futures)]
_SKIPPED = (*(f"{folder}{os.sep}" for folder in (_PACKAGE, *_LIBRARIES)), threading.__file__)


class Line(NamedTuple):
    """A line, and the globals of its module, where Python notes the warnings already shown."""

    file: str
    number: int
    module: dict[str, Any]


_HANDED_OVER: ContextVar[Line | None] = ContextVar("line of the caller", default=None)


def line_of_caller() -> Line | None:
    """The caller's line; None if there is none on this thread and none was handed over."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_SKIPPED):
        if frame.f_back is None:
            return _HANDED_OVER.get()
        frame = frame.f_back
    return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)


async def run_in_thread(call: Callable[[T], R], value: T) -> R:
    """`call(value)` in a thread; its warnings name the line that awaits it."""
    token = _HANDED_OVER.set(line_of_caller())
    try:
        return await asyncio.to_thread(call, value)
    finally:
        _HANDED_OVER.reset(token)


def warn_caller(message: str, category: type[Warning]) -> None:
    """Warn about the caller's line."""
    line = line_of_caller()
    if line is None:
        warnings.warn(message, category, stacklevel=2)
        return
    registry = line.module.setdefault("__warningregistry__", {})
    name = line.module.get("__name__")
    warnings.warn_explicit(message, category, line.file, line.number, name, registry)
