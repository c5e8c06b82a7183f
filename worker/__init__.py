"""The worker side of chatjobs: the inference engine, and the process that serves queues with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.engine.local import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    """Import torch on first access to `Engine`."""
    if name == "Engine":
        try:
            from worker.engine.local import Engine
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "worker.Engine generates and needs torch: pip install 'chatjobs[worker]'"
            ) from None
        return Engine
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
