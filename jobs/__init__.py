"""The public API for clients: submit jobs, follow their streams, read results."""

from __future__ import annotations

TYPE_CHECKING = False  # without `typing`: the command line handles Ctrl-C before it imports more
if TYPE_CHECKING:
    from typing import Any

    from jobs.api.answer import ChatCompletion
    from jobs.api.chunk import ChatChunk
    from jobs.api.params import RequestFields
    from jobs.api.request import ChatRequest, IgnoredFieldWarning
    from jobs.api.sampling import Sampling
    from jobs.client.aio import AsyncClient
    from jobs.client.aio_session import AsyncSession
    from jobs.client.client import Client
    from jobs.client.job import AsyncJob, Job
    from jobs.client.serving import NobodyServes
    from jobs.client.session import Session
    from jobs.errors import JobError, SessionBusy, StreamRestarted, WaitTimeout
    from jobs.results.files import Results

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncSession",
    "ChatChunk",
    "ChatCompletion",
    "ChatRequest",
    "Client",
    "IgnoredFieldWarning",
    "Job",
    "JobError",
    "NobodyServes",
    "RequestFields",
    "Results",
    "Sampling",
    "Session",
    "SessionBusy",
    "StreamRestarted",
    "WaitTimeout",
]

_LAZY = {
    "AsyncClient": "jobs.client.aio",
    "AsyncJob": "jobs.client.job",
    "AsyncSession": "jobs.client.aio_session",
    "ChatChunk": "jobs.api.chunk",
    "ChatCompletion": "jobs.api.answer",
    "ChatRequest": "jobs.api.request",
    "Client": "jobs.client.client",
    "IgnoredFieldWarning": "jobs.api.request",
    "Job": "jobs.client.job",
    "JobError": "jobs.errors",
    "NobodyServes": "jobs.client.serving",
    "RequestFields": "jobs.api.params",
    "Results": "jobs.results.files",
    "Sampling": "jobs.api.sampling",
    "Session": "jobs.client.session",
    "SessionBusy": "jobs.errors",
    "StreamRestarted": "jobs.errors",
    "WaitTimeout": "jobs.errors",
}


def __getattr__(name: str) -> Any:
    """Import what needs pydantic, redis or pyarrow on first use: `import jobs` stays fast."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jobs' has no attribute {name!r}")
