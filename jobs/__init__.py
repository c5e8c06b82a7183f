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
    from jobs.api.score_request import Choice, LogLikelihood, Perplexity, ScoreRequest
    from jobs.api.score_result import ContinuationScore, ScoredItem, ScoreResult, TextScore
    from jobs.client.aio import AsyncClient
    from jobs.client.aio_session import AsyncSession
    from jobs.client.client import Client
    from jobs.client.job import AsyncJob, AsyncScoreJob, Job, ScoreJob
    from jobs.client.run import AsyncRun, Run, RunStatus
    from jobs.client.serving import NobodyServes
    from jobs.client.session import Session
    from jobs.errors import JobError, SessionBusy, StreamRestarted, WaitTimeout
    from jobs.results.files import Results

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "AsyncRun",
    "AsyncScoreJob",
    "AsyncSession",
    "ChatChunk",
    "ChatCompletion",
    "ChatRequest",
    "Choice",
    "Client",
    "ContinuationScore",
    "IgnoredFieldWarning",
    "Job",
    "JobError",
    "LogLikelihood",
    "NobodyServes",
    "Perplexity",
    "RequestFields",
    "Results",
    "Run",
    "RunStatus",
    "Sampling",
    "ScoreJob",
    "ScoreRequest",
    "ScoreResult",
    "ScoredItem",
    "Session",
    "SessionBusy",
    "StreamRestarted",
    "TextScore",
    "WaitTimeout",
]

_LAZY = {
    "AsyncClient": "jobs.client.aio",
    "AsyncJob": "jobs.client.job",
    "AsyncRun": "jobs.client.run",
    "AsyncScoreJob": "jobs.client.job",
    "AsyncSession": "jobs.client.aio_session",
    "ChatChunk": "jobs.api.chunk",
    "ChatCompletion": "jobs.api.answer",
    "ChatRequest": "jobs.api.request",
    "Choice": "jobs.api.score_request",
    "Client": "jobs.client.client",
    "ContinuationScore": "jobs.api.score_result",
    "IgnoredFieldWarning": "jobs.api.request",
    "Job": "jobs.client.job",
    "JobError": "jobs.errors",
    "LogLikelihood": "jobs.api.score_request",
    "NobodyServes": "jobs.client.serving",
    "Perplexity": "jobs.api.score_request",
    "RequestFields": "jobs.api.params",
    "Results": "jobs.results.files",
    "Run": "jobs.client.run",
    "RunStatus": "jobs.client.run",
    "Sampling": "jobs.api.sampling",
    "ScoreJob": "jobs.client.job",
    "ScoreRequest": "jobs.api.score_request",
    "ScoreResult": "jobs.api.score_result",
    "ScoredItem": "jobs.api.score_result",
    "Session": "jobs.client.session",
    "SessionBusy": "jobs.errors",
    "StreamRestarted": "jobs.errors",
    "TextScore": "jobs.api.score_result",
    "WaitTimeout": "jobs.errors",
}


def __getattr__(name: str) -> Any:
    """Import what needs pydantic, redis or pyarrow on first use: `import jobs` stays fast."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'jobs' has no attribute {name!r}")
