"""The number of sequences that a worker claims ahead, by the number of recent ends."""

from __future__ import annotations

from worker.engine.slots import RECENT_SECONDS, FinishRate, Slots


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_ends_of_a_moment_ago_count() -> None:
    clock = Clock()
    rate = FinishRate(4, clock)
    assert rate.recent == 0
    rate.count()
    clock.now += RECENT_SECONDS / 2
    rate.count()
    rate.count()
    assert rate.recent == 3
    clock.now += 0.75 * RECENT_SECONDS
    assert rate.recent == 2
    clock.now += RECENT_SECONDS
    assert rate.recent == 0


def test_no_more_than_two_batches_count() -> None:
    for batch, most in ((16, 32), (2, 4), (1, 0)):  # a batch of one claims nothing ahead
        rate = FinishRate(batch, Clock())
        for _ in range(1000):
            rate.count()
        assert rate.recent == most


def test_the_queue_holds_half_a_batch_or_as_many_as_ended() -> None:
    empty = {"bulk_running": 0, "bulk_all": 0, "interactive": 0}
    for bulk in (True, False):
        rooms = [Slots(16).room(bulk=bulk, ended=ended, **empty) for ended in (0, 8, 9, 40)]
        assert rooms == [24, 24, 25, 56]
