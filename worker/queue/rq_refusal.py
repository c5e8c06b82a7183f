"""Returns a job to its queue when a stock RQ worker runs its function."""

from __future__ import annotations

from rq import Retry, get_current_job

RETRIES = 10**9  # RQ fails the job after so many; no job gets there


def is_run_by_rq() -> bool:
    """True if a stock RQ worker runs the calling function."""
    return get_current_job() is not None


def back_to_queue() -> Retry:
    """RQ puts the job to the front of its queue, and counts it as no failure of the job."""
    return Retry(max=RETRIES, enqueue_at_front=True)
