"""Interactive sequences before bulk ones: order, reserved slots, pauses, and no starvation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.errors import JobError
from tests.worker.engine.fakes import FakeSequence, advance, commit, make_caches, selected
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.slots import Slots
from worker.engine.wait_queue import ADMISSIONS_PER_BULK


def make_scheduler(slots: Slots, *, limit: int = 1 << 30, step_tokens: int = 1000) -> Scheduler:
    book, _ = make_caches(limit, slots=slots.batch + slots.paused + 1)
    return Scheduler(book, slots, step_tokens)


def add(scheduler: Scheduler, count: int, *, bulk: bool, length: int = 10) -> list[FakeSequence]:
    sequences = [FakeSequence(length, bulk=bulk) for _ in range(count)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def end(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.fail(JobError("cancelled", "ended by the test"))
    scheduler.remove(sequence)


def step(scheduler: Scheduler) -> list[Sequence]:
    return advance(scheduler)


def test_a_waiting_interactive_sequence_goes_before_the_bulk_ones() -> None:
    scheduler = make_scheduler(Slots(2))
    running = add(scheduler, 2, bulk=True)
    step(scheduler)
    add(scheduler, 3, bulk=True)
    (chat,) = add(scheduler, 1, bulk=False)
    end(scheduler, running[0])
    assert step(scheduler) == [chat, running[1]]


def test_bulk_leaves_the_reserved_slots_free() -> None:
    scheduler = make_scheduler(Slots(4, reserved=1))
    bulk = add(scheduler, 5, bulk=True)
    assert step(scheduler) == bulk[:3]
    (chat,) = add(scheduler, 1, bulk=False)
    assert step(scheduler) == [chat, *bulk[:3]]


def test_a_full_batch_pauses_the_newest_bulk_sequence_and_resumes_it_with_its_cache() -> None:
    scheduler = make_scheduler(Slots(2, preempt=True))
    first, second = add(scheduler, 2, bulk=True)
    step(scheduler)
    (chat,) = add(scheduler, 1, bulk=False)
    assert step(scheduler) == [chat, first]
    assert second.computed == 10 and second.slot is not None
    end(scheduler, chat)
    assert step(scheduler) == [first, second]
    assert second.computed == 11  # nothing was computed again


def test_of_many_paused_sequences_some_are_computed_again() -> None:
    scheduler = make_scheduler(Slots(4, preempt=True))
    bulk = add(scheduler, 4, bulk=True)
    step(scheduler)
    chats = add(scheduler, 4, bulk=False)
    assert step(scheduler) == chats
    assert [one.slot is not None for one in bulk] == [False, False, False, True]
    for chat in chats:
        end(scheduler, chat)
    assert step(scheduler) == bulk  # in their order
    assert [one.pending for one in bulk] == [1] * 4


def test_without_preemption_interactive_sequences_wait_for_a_slot() -> None:
    scheduler = make_scheduler(Slots(2))
    bulk = add(scheduler, 2, bulk=True)
    step(scheduler)
    add(scheduler, 1, bulk=False)
    assert step(scheduler) == bulk


def test_a_long_bulk_prompt_leaves_the_tokens_of_a_step_to_interactive_sequences() -> None:
    scheduler = make_scheduler(Slots(4), step_tokens=80)
    (long,) = add(scheduler, 1, bulk=True, length=1000)
    assert selected(scheduler) == [(long, 80)]
    commit(scheduler)
    (chat,) = add(scheduler, 1, bulk=False, length=60)
    assert selected(scheduler) == [(chat, 60), (long, 20)]
    commit(scheduler)
    (other,) = add(scheduler, 1, bulk=False, length=1000)
    assert selected(scheduler) == [(chat, 1), (other, 69), (long, 10)]  # an eighth is kept


def test_a_full_cache_takes_the_cache_of_paused_and_bulk_sequences_first() -> None:
    scheduler = make_scheduler(Slots(3, preempt=True), limit=3 * 256)
    bulk = add(scheduler, 3, bulk=True, length=250)
    step(scheduler)
    chats = add(scheduler, 2, bulk=False, length=250)
    assert step(scheduler) == [*chats, bulk[0]]
    assert [one.slot is not None for one in bulk] == [True, False, False]
    assert sorted(one.slot or 0 for one in chats) == [1, 2]
    for _ in range(5):
        assert step(scheduler) == [*chats, bulk[0]]
    assert step(scheduler) == chats  # at 257 tokens the bulk sequence does not fit any more
    assert [one.slot for one in bulk] == [None] * 3


def test_room_for_interactive_jobs_does_not_depend_on_bulk_jobs_that_can_be_paused() -> None:
    full = {"bulk_running": 14, "bulk_all": 22, "interactive": 0}
    assert Slots(16, 2, preempt=True).room(bulk=True, **full) == 0
    assert Slots(16, 2, preempt=True).room(bulk=False, **full) == 24
    assert Slots(16, 2, preempt=False).room(bulk=False, **full) == 10
    busy = {"bulk_running": 0, "bulk_all": 0, "interactive": 24}
    assert Slots(16, 2, preempt=True).room(bulk=True, **busy) == 1  # bulk jobs do not starve
    assert Slots(16, 2, preempt=True).room(bulk=False, **busy) == 0


@pytest.mark.parametrize(("batch", "reserved"), [(4, 4), (1, 1), (4, -1)])
def test_slots_that_leave_none_to_bulk_jobs_are_refused(batch: int, reserved: int) -> None:
    with pytest.raises(JobError, match=f"interactive_slots must be 0 to {batch - 1}"):
        Slots.share(batch, reserved, True)


def test_the_default_slots() -> None:
    assert Slots.share(128, None, True) == Slots(128, 0, True)
    assert Slots.share(128, None, False) == Slots(128, 8, False)
    assert Slots.share(4, None, False) == Slots(4, 1, False)
    assert Slots.share(1, None, False) == Slots(1, 0, False)
    assert Slots.share(1, None, True) == Slots(1, 0, False)  # strictly one after the other


@settings(max_examples=150)
@given(
    batch=st.integers(1, 5),
    reserved=st.integers(0, 2),
    preempt=st.booleans(),
    limit=st.sampled_from([1 << 30, 1100]),
    arrivals=st.lists(
        st.tuples(st.booleans(), st.integers(1, 300), st.integers(1, 20)), max_size=25
    ),
    gaps=st.lists(st.integers(0, 3), min_size=25, max_size=25),
)
def test_every_sequence_ends_and_none_is_taken_before_an_interactive_one(
    batch: int,
    reserved: int,
    preempt: bool,
    limit: int,
    arrivals: list[tuple[bool, int, int]],
    gaps: list[int],
) -> None:
    scheduler = make_scheduler(
        Slots.share(batch, min(reserved, batch - 1), preempt), limit=limit, step_tokens=100
    )
    coming = [
        (gap, FakeSequence(length, bulk=bulk, max_tokens=tokens, ignore_eos=True))
        for (bulk, length, tokens), gap in zip(arrivals, gaps, strict=False)
    ]
    sequences = [sequence for _, sequence in coming]
    wait = coming[0][0] if coming else 0
    for _ in range(3000):
        while coming and wait == 0:
            scheduler.add(coming.pop(0)[1])
            wait = coming[0][0] if coming else 0
        wait = max(0, wait - 1)
        before = set(map(id, scheduler.running))
        waiting = [one for one in scheduler.waiting.first if not one.bulk]
        scheduled = selected(scheduler)
        begun = [one for one in scheduler.running if id(one) not in before]
        assert len(scheduler.running) <= batch
        assert sum(count for _, count in scheduled) <= 100
        if limit > 1100:  # a full cache may make interactive sequences wait
            left = [one for one in waiting if one not in scheduler.running and not one.ended]
            ordinary = [one for one in begun if scheduler._preemptible(one)]
            spent = sum(count for _, count in scheduled) >= 100 - 13  # an eighth is kept for bulk
            assert not (left and ordinary) or spent
            assert [one for one in begun if one in waiting] == waiting[: len(waiting) - len(left)]
        commit(scheduler)
        if not coming and not scheduler.running and not len(scheduler.waiting):
            break
    assert all(one.ended for one in sequences)
    assert all(one.events[-1].error is None for one in sequences)
    scheduler.book.trim()
    assert scheduler.book.bytes_held == 0  # no slot is in use


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_bulk_does_not_starve_while_interactive_sequences_never_end_to_come(
    batch: int, preempt: bool
) -> None:
    scheduler = make_scheduler(Slots.share(batch, None, preempt))
    bulk = [FakeSequence(10, bulk=True, max_tokens=30, ignore_eos=True) for _ in range(3)]
    for one in bulk:
        scheduler.add(one)
    ended = 0
    for _ in range(1500):
        while len(scheduler.waiting.first) < 2 * batch:
            scheduler.add(FakeSequence(10, max_tokens=2, ignore_eos=True))
        for sequence in step(scheduler):
            if sequence.ended:
                scheduler.remove(sequence)
                ended += not sequence.bulk
        if all(one.ended for one in bulk):
            break
    assert all(one.ended for one in bulk)
    assert ended >= ADMISSIONS_PER_BULK  # interactive ones were served meanwhile
