"""What a job function returns to a stock RQ worker so that the job waits again."""

from __future__ import annotations

from rq import Retry

RETRIES = 10**9  # RQ fails the job after so many; no job gets there


def back_to_queue() -> Retry:
    """RQ puts the job to the front of its queue, and counts it as no failure of the job."""
    return Retry(max=RETRIES, enqueue_at_front=True)
