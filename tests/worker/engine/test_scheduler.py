"""Admission, token budget, preemption and isolation."""

from __future__ import annotations

import pickle
from collections.abc import Sequence as SequenceOf

import pytest

from jobs.errors import JobError
from tests.worker.engine.fakes import (
    CONTEXT,
    FakeLayer,
    FakeRows,
    FakeSequence,
    advance,
    commit,
    make_caches,
    selected,
)
from worker.cache.book import CacheBook
from worker.cache.changes import Place, Resize
from worker.cache.sizes import CacheSizes
from worker.cache_memory import alone
from worker.engine.scheduler import Scheduler
from worker.engine.slots import Slots
from worker.kernels.attention import PAGE
from worker.layers.cache import Size
from worker.sampling.sampler import Sampled


def make_scheduler(
    *lengths: int, limit: int = 1 << 30, max_batch: int = 3, step_tokens: int = 1000
) -> tuple[Scheduler, list[FakeSequence]]:
    """A scheduler with a waiting sequence for each prompt length."""
    book, _ = make_caches(limit, slots=max_batch + 1)
    scheduler = Scheduler(book, Slots(max_batch), step_tokens)
    sequences = [FakeSequence(length) for length in lengths]
    for sequence in sequences:
        scheduler.add(sequence)
    return scheduler, sequences


def errors(sequences: SequenceOf[FakeSequence]) -> list[JobError | None]:
    return [one.events[-1].error if one.events else None for one in sequences]


def test_waiting_sequences_are_admitted_in_order_until_the_batch_is_full() -> None:
    scheduler, sequences = make_scheduler(10, 20, 30, 40)
    assert selected(scheduler) == [(sequences[0], 10), (sequences[1], 20), (sequences[2], 30)]
    assert scheduler.running == sequences[:3]
    assert list(scheduler.waiting) == sequences[3:]
    assert [one.slot for one in sequences] == [0, 1, 2, None]
    assert all(one.started_at for one in sequences[:3])


def test_an_ended_sequence_makes_place_for_the_next() -> None:
    scheduler, sequences = make_scheduler(10, 20, 30, 40)
    advance(scheduler)
    scheduler.remove(sequences[1])
    assert selected(scheduler) == [(sequences[0], 1), (sequences[2], 1), (sequences[3], 40)]
    assert sequences[1].slot is None
    assert sequences[3].slot == 1


def test_the_token_budget_goes_to_the_oldest_first() -> None:
    scheduler, (first, second, third) = make_scheduler(60, 70, 80, step_tokens=100)
    assert selected(scheduler) == [(first, 60), (second, 40)]
    commit(scheduler)
    assert selected(scheduler) == [(first, 1), (second, 30), (third, 69)]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    scheduler, (long,) = make_scheduler(250, step_tokens=100)
    counts = []
    for _ in range(4):
        counts += [count for _, count in selected(scheduler)]
        commit(scheduler)
    assert counts == [100, 100, 50, 1]
    assert len(long.output_ids) == 2


def test_a_full_cache_preempts_the_newest_sequence_first() -> None:
    scheduler, (first, second, third) = make_scheduler(256, 256, 256, limit=3 * 256)
    advance(scheduler)
    scheduled = selected(scheduler)  # 3 * 257 tokens exceed the limit
    assert scheduled == [(first, 1), (second, 1)]
    assert list(scheduler.waiting) == [third]
    assert (third.computed, third.slot) == (0, None)
    assert third.pending == 257  # the prompt and the token it had sampled


def test_a_preempted_sequence_returns_before_later_arrivals() -> None:
    scheduler, (first, second, third) = make_scheduler(256, 256, 256, limit=3 * 256)
    advance(scheduler)
    late = FakeSequence(512)
    scheduler.add(late)
    advance(scheduler)
    assert list(scheduler.waiting) == [third, late]
    scheduler.remove(first)
    scheduler.remove(second)
    assert selected(scheduler) == [(third, 257)]
    assert list(scheduler.waiting) == [late]


def test_a_sequence_too_large_for_the_cache_fails_with_the_numbers() -> None:
    mib = 2**20
    book, _ = make_caches(8 * mib, columns=64 * mib)
    scheduler = Scheduler(book, Slots(3), step_tokens=64 * mib)
    large, small = FakeSequence(CONTEXT - 1), FakeSequence(5)
    large.prompt_ids = [7] * 9 * mib
    scheduler.add(large)
    scheduler.add(small)
    assert selected(scheduler) == [(small, 5)]
    error = errors([large])[0]
    assert error is not None and error.code == "out_of_memory"
    assert f"a sequence of {large.length} tokens needs 9.4 MB" in error.message
    assert "the limit is 8.4 MB" in error.message


def test_a_sequence_that_outgrows_the_cache_alone_fails() -> None:
    scheduler, (only,) = make_scheduler(300, limit=304)
    while advance(scheduler):
        pass
    assert only.ended and scheduler.running == [] and not scheduler.waiting
    assert only.length == 305
    error = errors([only])[0]
    assert error is not None and error.code == "out_of_memory"


def test_a_sequence_that_can_never_fit_takes_no_memory_of_others() -> None:
    """Also if the first part of its prompt would fit."""
    scheduler, (first, large, last) = make_scheduler(100, 400, 100, limit=304, step_tokens=110)
    assert selected(scheduler) == [(first, 100), (last, 10)]
    error = errors([large])[0]
    assert error is not None and error.code == "out_of_memory"
    assert "a sequence of 400 tokens needs" in error.message


@pytest.mark.parametrize("bulk", [False, True])
def test_a_sequence_that_is_left_alone_goes_on_in_the_lowest_slot(bulk: bool) -> None:
    """In another one it pays for the rows of those below it."""
    book, _ = make_caches(20 * PAGE, kinds=(FakeLayer, FakeRows))
    scheduler = Scheduler(book, Slots(3), 1000)
    short, other, long = (FakeSequence(n, bulk=bulk, max_tokens=200) for n in (10, 10, 200))
    for sequence in (short, other, long):
        scheduler.add(sequence)
    advance(scheduler)
    assert long.slot == 2
    for sequence in (short, other):
        scheduler.remove(sequence)
    while long.length < 17 * PAGE + 1:
        assert advance(scheduler) == [long] and long.slot == 2
    while not long.ended:
        for one in advance(scheduler):
            assert one is long and long.slot == 0
    assert long.length == 19 * PAGE + 1  # with one row that is all


def test_after_a_failed_step_sequences_run_one_at_a_time_until_they_end() -> None:
    scheduler, (first, second, third) = make_scheduler(10, 20, 30)
    scheduler.schedule()
    late = FakeSequence(5)
    scheduler.add(late)
    scheduler.isolate(scheduler.running, JobError("internal", "failed"))
    assert scheduler.running == []
    assert list(scheduler.waiting) == [first, second, third, late]
    for sequence in (first, second, third):
        assert [one for one, _ in selected(scheduler)] == [sequence]
        sequence.fail(JobError("internal", "failed"))
        scheduler.remove(sequence, poisoned=True)
    scheduler.add(FakeSequence(5))
    assert len(selected(scheduler)) == 2  # isolation has ended


def test_cancelled_sequences_are_removed_running_or_waiting() -> None:
    scheduler, sequences = make_scheduler(10, 20, 30, 40)
    scheduler.schedule()
    sequences[1].cancel()
    sequences[3].cancel()
    scheduler.remove_cancelled()
    assert scheduler.running == [sequences[0], sequences[2]]
    assert not scheduler.waiting
    assert [error and error.code for error in errors(sequences)] == [
        *(None, "cancelled", None, "cancelled")
    ]


def test_fail_all_ends_every_sequence_and_frees_its_slot() -> None:
    scheduler, sequences = make_scheduler(10, 20, 30, 40)
    scheduler.schedule()
    assert scheduler.book.bytes_held > 0
    reason = JobError("cancelled", "the engine was closed")
    scheduler.fail_all(reason)
    assert errors(sequences) == [reason] * 4
    assert scheduler.running == [] and not scheduler.waiting
    scheduler.book.trim()
    assert scheduler.book.bytes_held == 0


def test_a_plan_can_be_sent_to_another_process() -> None:
    sizes = CacheSizes([FakeLayer()])
    book = CacheBook(sizes, max_slots=4, max_columns=CONTEXT, share=alone(1 << 30))
    scheduler, sequence = Scheduler(book, Slots(3), step_tokens=1000), FakeSequence(300)
    scheduler.add(sequence)
    plan = scheduler.schedule()
    assert pickle.loads(pickle.dumps(plan)) == plan
    places = tuple((0, number, number) for number in range(19))
    assert plan.changes == (Resize(Size(4, 512, 64), 0), Place(places))
    assert [(span.slot, span.start, span.length) for span in plan.spans] == [(0, 0, 300)]
    assert sequence.computed == 0  # until it is committed


@pytest.mark.parametrize("how", ["stop token", "length", "error"])
def test_a_sequence_has_ended_only_after_its_last_event(how: str) -> None:
    """Another thread may wait for the end and read the events next."""
    seen: list[bool] = []
    sequence = FakeSequence(3, max_tokens=1 if how == "length" else 9)
    sequence._listener = lambda event: seen.append(sequence.ended)
    if how == "error":
        sequence.fail(JobError("internal", "failed"))
    else:
        sequence.accept(Sampled(5 if how == "length" else 2, True))
    assert seen == [False]
    assert sequence.ended
