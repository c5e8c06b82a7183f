"""The function that our jobs name. RQ's tools show it; only `chatjobs work` runs it."""

from __future__ import annotations

from typing import Any, NoReturn

from jobs.errors import JobError


def chat_completion(request: dict[str, Any]) -> NoReturn:
    """Reached only if a stock RQ worker takes one of our jobs: it has no model to run it with."""
    raise JobError(
        "internal",
        f"a stock RQ worker can't run chat jobs: serve them with chatjobs work "
        f"--model {request.get('model')}",
    )
