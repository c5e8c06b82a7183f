"""chatjobs for producers, subscribers and analysts: submit jobs, follow streams, read results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jobs.errors import JobError
from jobs.types import ChatChunk, ChatCompletion, ChatRequest, Sampling

if TYPE_CHECKING:
    from jobs.aio import AsyncClient, AsyncJob
    from jobs.client import Client, Job
    from jobs.results import Results

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "ChatChunk",
    "ChatCompletion",
    "ChatRequest",
    "Client",
    "Job",
    "JobError",
    "Results",
    "Sampling",
]

_LAZY = {
    "AsyncClient": "jobs.aio",
    "AsyncJob": "jobs.aio",
    "Client": "jobs.client",
    "Job": "jobs.client",
    "Results": "jobs.results",
}


def __getattr__(name: str) -> Any:
    """Load what needs redis or pyarrow when it is first asked for: `import jobs` stays quick."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jobs' has no attribute {name!r}")
