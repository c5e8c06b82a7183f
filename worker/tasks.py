"""The function that every job names. RQ's tools show it; only `chatjobs work` runs these jobs."""

from __future__ import annotations

import logging
import time
from typing import Any

from worker.queue.rq_refusal import back_to_queue

PAUSE_SECONDS = 2.0  # before the job goes back: a stock worker would take it again at once

logger = logging.getLogger("rq.worker")


def chat_completion(request: dict[str, Any]) -> Any:
    """Called only if a stock RQ worker takes the job: that worker has no model, and the job goes
    back to its queue."""
    logger.error(
        "a stock RQ worker can't run chat jobs, so the job goes back to its queue: stop this "
        "worker, and serve the jobs with chatjobs work --model %s",
        request.get("model"),
    )
    time.sleep(PAUSE_SECONDS)
    return back_to_queue()
