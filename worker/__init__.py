"""The worker side of chatjobs: the inference engine, and the process that serves queues with it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.local.engine import Engine
    from worker.local.session import ChatSession

__all__ = ["ChatSession", "Engine"]

_MODULES = {"ChatSession": "worker.local.session", "Engine": "worker.local.engine"}


def advice() -> str:
    """The command that installs the packages for generation."""
    from jobs.install import command_for

    return (
        f"{command_for('worker')} (on Linux a download of about 3 GB with CUDA, and of 0.2 GB "
        "with --extra-index-url https://download.pytorch.org/whl/cpu)"
    )


def __getattr__(name: str) -> Any:
    """Import torch on first access to what generates."""
    if name in _MODULES:
        try:
            return getattr(import_module(_MODULES[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(f"worker.{name} generates and needs torch: {advice()}") from None
    raise AttributeError(f"module 'worker' has no attribute {name!r}")
