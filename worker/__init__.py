"""The GPU side of chatjobs: the engine, and the worker that serves queues with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import torch only when the engine is asked for."""
    if name == "Engine":
        try:
            from worker.engine.engine import Engine
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "worker.Engine generates and needs torch: pip install 'chatjobs[worker]'"
            ) from None
        return Engine
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
