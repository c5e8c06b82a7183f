"""A worker is dead when it does not renew its lease while this one could have renewed its own."""

from __future__ import annotations

import pytest

from jobs.store.workers import DeadWorker
from worker.queue.failure_detector import FailureDetector

LEASE = 12.0


@pytest.fixture
def detector() -> FailureDetector:
    return FailureDetector("me", LEASE)


def looks(
    detector: FailureDetector,
    start: float,
    until: float,
    *,
    connection: int = 1,
    renews: bool = True,
) -> list[DeadWorker]:
    """The dead workers that the last of several looks, 3 s apart, finds. "other" does not renew its
    lease; this one does, unless `renews` is false."""
    found: list[DeadWorker] = []
    while start <= until:
        found = detector.look({"me": int(renews * start), "other": 7}, connection, start)
        start += 3.0
    return found


def test_a_worker_that_does_not_renew_for_a_lease_is_dead(detector: FailureDetector) -> None:
    assert looks(detector, 0.0, 9.0) == []
    assert detector.look({"me": 12, "other": 7}, 1, 12.0) == [DeadWorker("other", 7)]


def test_a_renewed_lease_is_alive(detector: FailureDetector) -> None:
    looks(detector, 0.0, 9.0)
    assert detector.look({"other": 8}, 1, 12.0) == []
    assert detector.look({"other": 8}, 1, 18.0) == []


def test_time_before_a_new_connection_does_not_count(detector: FailureDetector) -> None:
    looks(detector, 0.0, 9.0)
    assert looks(detector, 12.0, 21.0, connection=2) == []
    assert detector.look({"me": 24, "other": 7}, 2, 24.0) == [DeadWorker("other", 7)]


def test_time_in_which_redis_takes_no_renewals_does_not_count(detector: FailureDetector) -> None:
    """It answers reads, as one with too few replicas or a full disk does."""
    assert looks(detector, 0.0, 60.0, renews=False) == []
    assert looks(detector, 63.0, 72.0) == []
    assert looks(detector, 75.0, 75.0) == [DeadWorker("other", 7)]


def test_time_before_a_failed_look_does_not_count(detector: FailureDetector) -> None:
    looks(detector, 0.0, 9.0)
    detector.forget()
    assert looks(detector, 12.0, 21.0) == []
    assert looks(detector, 24.0, 24.0) == [DeadWorker("other", 7)]


def test_looks_far_apart_prove_nothing(detector: FailureDetector) -> None:
    """This worker was suspended, or Redis did not reply: the others may not have been able to."""
    looks(detector, 0.0, 9.0)
    assert looks(detector, 60.0, 69.0) == []
    assert looks(detector, 72.0, 72.0) == [DeadWorker("other", 7)]
