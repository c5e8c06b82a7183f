"""Cache layers and sequences without a model, for unit tests of the scheduler and the pool."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch
from torch import Tensor

from jobs.api.sampling import Sampling
from worker.cache.book import CacheBook
from worker.cache.changes import CacheChange
from worker.cache.pool import CachePool
from worker.cache.sizes import CacheSizes
from worker.cache_memory import alone
from worker.checkpoint.config import GenerationDefaults
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence, TokenEvent
from worker.kernels.attention import PAGE
from worker.layers.cache import LayerCache, Moves, Size, resize_pages, resize_slots
from worker.sampling.params import resolve_params
from worker.sampling.sampler import Sampled, StepResult

CONTEXT = 4096


class FakeLayer:
    """One byte per token, in pages."""

    paged = rewinds = True
    needs_clearing = False
    kind = "fake"
    parts: tuple[str, ...] = ("bytes",)
    token_bytes = 1

    def __init__(self) -> None:
        self.pages = torch.zeros(0, 1, PAGE, 1, dtype=torch.uint8)

    def attach(self, table: Tensor) -> None:
        self.table = table

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        self.pages = resize_pages(self.pages, size.pages, moves)

    def bytes_for(self, size: Size) -> int:
        return size.pages * PAGE

    def storage(self) -> list[Tensor]:
        return [self.pages]

    def byte(self, slot: int, column: int) -> Tensor:
        """The one of a token, to read and to set."""
        return self.pages[int(self.table[slot, column // PAGE]), 0, column % PAGE, 0]


class FakeSlotLayer:
    """One value per slot, of no bytes."""

    paged = rewinds = False
    needs_clearing = True
    kind = "fake slots"
    parts: tuple[str, ...] = ("values",)

    def __init__(self) -> None:
        self.values = torch.zeros(0, 1)

    def resize(self, size: Size, *, keep: int, moves: Moves = ()) -> None:
        self.values = resize_slots(self.values, size.slots, keep)

    def bytes_for(self, size: Size) -> int:
        return 0

    def clear(self, slot: int) -> None:
        self.values[slot] = 0

    def views(self, slot: int, end: int) -> list[Tensor]:
        return [self.values[slot]]

    def save(self, slot: int, start: int, end: int) -> list[Tensor]:
        return [self.values[slot].clone()]

    def restore(
        self, slot: int, saved: SequenceOf[Tensor], start: int, kept: int, end: int
    ) -> None:
        self.values[slot] = saved[0]


class FakeRows(FakeSlotLayer):
    """As many bytes as a page per slot, whatever its tokens."""

    def bytes_for(self, size: Size) -> int:
        return size.slots * PAGE


class FakeRing(FakeSlotLayer):
    """One byte for each of the last tokens of a slot."""

    rewinds = True
    window = 200

    def bytes_for(self, size: Size) -> int:
        return size.slots * min(size.columns, self.window)


class FakeDetokenizer:
    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def finish(self) -> str:
        return ""


class Applied(CacheBook):
    """A book whose changes are made at once."""

    pool: CachePool

    def emit(self, change: CacheChange) -> None:
        self.pool.execute(change)


def make_caches(
    limit: int = 1 << 30,
    *,
    slots: int = 4,
    columns: int = CONTEXT,
    kinds: SequenceOf[type[LayerCache]] = (FakeLayer,),
) -> tuple[CacheBook, CachePool]:
    """Caches of layers of these kinds: of a paged one if nothing else is said, where `limit` is in
    tokens, since each is a byte."""

    def layers() -> list[LayerCache]:
        return [kind() for kind in kinds]

    pool = CachePool(layers, slots=slots)
    book = Applied(CacheSizes(layers()), max_slots=slots, max_columns=columns, share=alone(limit))
    book.pool = pool
    return book, pool


def layer_of(pool: CachePool) -> FakeLayer:
    layer = pool.layers[0]
    assert isinstance(layer, FakeLayer)
    return layer


class FakeSequence(Sequence):
    """A sequence that keeps its events."""

    def __init__(self, length: int, *, bulk: bool = False, **sampling: Any) -> None:
        params = resolve_params(
            Sampling(**sampling),
            GenerationDefaults(eos_token_ids=frozenset({2})),
            prompt_length=length,
            context_length=CONTEXT,
            vocab_size=100,
        )
        self.events: list[TokenEvent] = []
        detokenizer: Any = FakeDetokenizer()
        super().__init__([7] * length, params, 0, detokenizer, self.events.append, bulk=bulk)


def selected(scheduler: Scheduler) -> list[tuple[Sequence, int]]:
    """The sequences of the next step, oldest first, and the tokens that each one computes."""
    plan = scheduler.schedule()
    assert [one.span() for one in scheduler.scheduled] == [*plan.spans]
    return sorted(
        ((one.sequence, one.tokens) for one in scheduler.scheduled),
        key=lambda pair: scheduler.running.index(pair[0]),
    )


def advance(scheduler: Scheduler) -> list[Sequence]:
    """Take a step whose every token is 5. Returns its sequences, oldest first."""
    sequences = [sequence for sequence, _ in selected(scheduler)]
    commit(scheduler)
    return sequences


def commit(scheduler: Scheduler) -> None:
    """Let every token of the planned step be 5."""
    batch = scheduler.sampling()
    checks = [True] * len(batch.checked)
    result = StepResult([Sampled(5, True)] * len(batch.rows), checks=checks)
    scheduler.commit(scheduler.scheduled, result)
