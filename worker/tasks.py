"""The functions that jobs name. RQ's tools show them; only `chatjobs work` runs these jobs."""

from __future__ import annotations

import logging
import time
from typing import Any

from jobs.errors import JobError
from worker.queue.rq_refusal import back_to_queue, is_run_by_rq

RETURN_SECONDS = 2.0  # before the job goes back: a stock worker would take it again at once

logger = logging.getLogger("rq.worker")


def chat_completion(request: dict[str, Any]) -> Any:
    """Called only if a stock RQ worker takes the job: that worker has no model, and the job goes
    back to its queue. Raises JobError if no RQ worker calls it."""
    return _refuse(request, "chat jobs")


def score(request: dict[str, Any]) -> Any:
    """Called only if a stock RQ worker takes the job, see `chat_completion`."""
    return _refuse(request, "scoring jobs")


def _refuse(request: dict[str, Any], jobs: str) -> Any:
    refusal = (
        f"a stock RQ worker can't run {jobs}: stop it, and serve the jobs with chatjobs work "
        f"--model {request.get('model')}"
    )
    if not is_run_by_rq():
        raise JobError("internal", refusal)
    logger.error("%s; the job goes back to its queue", refusal)
    time.sleep(RETURN_SECONDS)
    return back_to_queue()
