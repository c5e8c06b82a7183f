"""The function that every job names. RQ's tools show it; only `chatjobs work` runs these jobs."""

from __future__ import annotations

from typing import Any, NoReturn

from jobs.errors import JobError


def chat_completion(request: dict[str, Any]) -> NoReturn:
    """Called only if a stock RQ worker takes the job. Raises JobError: that worker has no model."""
    raise JobError(
        "internal",
        f"a stock RQ worker can't run chat jobs: serve them with chatjobs work "
        f"--model {request.get('model')}",
    )
