"""The decision to retry a job whose attempt has failed, and the pause before it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jobs.api.job_options import DEFAULT_RETRIES
from worker.backend import MachineError
from worker.queue.attempt import Attempt

RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0  # before the first retry, and at most


@dataclass(frozen=True, slots=True)
class Retry:
    """`pause`: seconds until the job is queued again. `allowed`: retries of the job in all; None
    after an error of this machine, which takes none of them."""

    pause: float
    allowed: int | None = None


def retry_of(attempt: Attempt) -> Retry | None:
    """The retry of an attempt that has ended; None if it has not failed or its job has none left.
    RQ's `Retry` sets the pauses, if it is given."""
    error, claimed, limits = attempt.error, attempt.claimed, attempt.claimed.limits
    if error is None or error.code == "cancelled":
        return None
    if isinstance(error, MachineError):
        return Retry(backoff(limits.machine_errors))
    # RQ retries after any error, `job.retries` are for those that may not happen again.
    own = attempt.request.job.retries
    own = (DEFAULT_RETRIES if own is None else own) if error.retryable else 0
    allowed = max(own, limits.retries)
    if claimed.retried >= allowed:
        return None
    interval = limits.interval(claimed.retried)
    return Retry(backoff(claimed.retried) if interval is None else interval, allowed)


def backoff(retried: int) -> float:
    """Seconds until a job that was retried so many times is queued again, twice as long each time.
    A random part keeps jobs that failed together from returning together."""
    longest = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2.0 ** min(retried, 20))
    return longest * random.uniform(0.5, 1.0)
