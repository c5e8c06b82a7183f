"""A device that has less memory than the limit of the KV cache says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.engine.fakes import FakeSequence, make_caches, selected
from worker import Engine
from worker.cache.changes import Release, Resize
from worker.cache.pool import CachePool
from worker.engine.scheduler import Scheduler
from worker.engine.slots import Slots
from worker.kernels.attention import PAGE

GREEDY = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
SYSTEM = [5 + i % 90 for i in range(200)]
PROMPTS = [[5 + number] * (20 + number) for number in range(8)]


def load(path: Path, **options: Any) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=8, **options)


class Memory:
    """Lets storage have so many tokens; counts those that are refused."""

    def __init__(self, patch: pytest.MonkeyPatch, cells: int) -> None:
        self.cells, self.refused, self.granted = cells, 0, 0
        execute = CachePool.execute

        def limited(pool: CachePool, change: Any) -> None:
            if isinstance(change, Resize):
                if change.size.pages * PAGE > self.cells:
                    self.refused += 1
                    raise torch.OutOfMemoryError("no room\nand more about it")
                self.granted = change.size.pages * PAGE
            execute(pool, change)

        patch.setattr(CachePool, "execute", limited)


@pytest.mark.parametrize(("cells", "together"), [(8 * 48, 8), (3 * 48, 4), (2 * 48, 3), (48, 1)])
def test_storage_that_cannot_be_allocated_is_planned_smaller(
    path: Path, monkeypatch: pytest.MonkeyPatch, cells: int, together: int
) -> None:
    """No request fails, and as many run together as there is memory for."""
    expected = load(path, prefix_cache=False).generate(PROMPTS, GREEDY)
    engine = load(path, prefix_cache=False)
    memory = Memory(monkeypatch, cells)
    most = 0
    model: Any = engine._core.runner.model

    def watched(*args: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, engine._core.running)
        logits: torch.Tensor = model(*args)
        return logits

    monkeypatch.setattr(engine._core.runner, "model", watched)
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert 0 < memory.refused < 20
    assert most == together


def test_a_sequence_that_is_too_large_even_alone_says_so(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    Memory(monkeypatch, 200)
    with pytest.raises(JobError, match="no memory for 250 tokens: no room; shorten") as caught:
        engine.generate([[7] * 250], GREEDY)
    assert caught.value.code == "out_of_memory"
    assert len(engine.generate([[7] * 20], GREEDY)[0].token_ids) == 8


def test_the_whole_is_tried_again_once_the_engine_was_empty(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    memory = Memory(monkeypatch, 600)
    engine.generate(PROMPTS, GREEDY)
    assert memory.granted <= 600
    memory.cells, memory.refused = 10**6, 0
    engine.generate(PROMPTS, GREEDY)
    assert memory.refused == 0 and memory.granted > 9 * 256 - 1


def test_an_error_of_one_sequence_is_not_taken_for_a_lack_of_storage(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that failed together still run one at a time after storage could not grow."""
    book, _ = make_caches(slots=4)
    scheduler = Scheduler(book, Slots(3), step_tokens=1000)
    sequences = [FakeSequence(10) for _ in range(3)]
    for one in sequences:
        scheduler.add(one)
    selected(scheduler)
    scheduler.isolate(sequences, JobError("internal", "failed"))
    selected(scheduler)
    scheduler.isolate(scheduler.isolated, JobError("out_of_memory", "no room"))
    assert len(selected(scheduler)) == 1


@pytest.mark.parametrize("shrink", ["trim", "evict", "give_back"])
def test_storage_that_cannot_shrink_is_freed(
    path: Path, monkeypatch: pytest.MonkeyPatch, shrink: str
) -> None:
    """What is kept would have to be copied, and the device has no memory for that."""
    engine = load(path)
    core = engine._core
    expected = engine.generate(PROMPTS, GREEDY)
    assert len(core.book.kept) > 0
    memory = Memory(monkeypatch, 0)
    getattr(core, shrink)(*[1] * (shrink != "trim"))
    assert memory.refused == 1 and core.bytes_held == 0
    memory.cells = 10**6
    assert engine.generate(PROMPTS, GREEDY) == expected
    assert memory.refused == 1


class Shrinking:
    """Once `lacking`, refuses storage that has fewer pages or slots than before; counts how
    often."""

    def __init__(self, patch: pytest.MonkeyPatch, *, lacking: bool) -> None:
        self.lacking, self.refused = lacking, 0
        execute, sizes = CachePool.execute, dict[CachePool, Any]()

        def limited(pool: CachePool, change: Any) -> None:
            if isinstance(change, Release):
                sizes.pop(pool, None)
            if isinstance(change, Resize):
                before, size = sizes.get(pool, change.size), change.size
                fewer = size.pages < before.pages or size.slots < before.slots
                if self.lacking and fewer:
                    self.refused += 1
                    raise torch.OutOfMemoryError("no room")
                sizes[pool] = size
            execute(pool, change)

        patch.setattr(CachePool, "execute", limited)


@pytest.mark.parametrize("others", ["none", "stream", "cancelled"])
def test_a_prompt_is_saved_while_storage_cannot_shrink(
    others: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has made the storage too large, the file is written and streams go on."""
    plain = load(folder)
    plain.save_prompt_cache(SYSTEM, tmp_path / "plain")
    long = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
    expected = plain.generate([[9] * 20], long)[0].token_ids
    limit = plain._core.book.bytes_for_one(len(SYSTEM)) * 19 // 10
    engine = load(folder, cache_bytes=limit)
    shrinking = Shrinking(monkeypatch, lacking=True)
    engine.generate([[8] * (len(SYSTEM) - 10)], GREEDY)
    prompts = {"none": [], "stream": [[9] * 20], "cancelled": [[7] * 30]}[others]
    streams: list[Any] = [engine.generate_stream(prompt, long) for prompt in prompts]
    found = [next(stream).id for stream in streams]
    if others == "cancelled":
        for stream in streams:
            stream.close()
    assert engine.save_prompt_cache(SYSTEM, tmp_path / "f") == len(SYSTEM)
    assert (tmp_path / "f").read_bytes() == (tmp_path / "plain").read_bytes()
    if others == "stream":
        assert [*found, *[token.id for token in streams[0]]] == expected
    assert len(engine.generate([[6] * 20], GREEDY)[0].token_ids) == 8
    assert (shrinking.refused > 0) == engine._core.book.sizes.needs_snapshots


def test_a_prompt_is_loaded_where_storage_cannot_shrink(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load(path)
    plain.save_prompt_cache(SYSTEM, tmp_path / "f")
    long = Sampling(temperature=0, max_tokens=60, ignore_eos=True)
    expected = plain.generate([[9] * 20], long)[0].token_ids
    engine = load(path, cache_bytes=plain._core.book.bytes_for_one(400) * 7 // 4)
    shrinking = Shrinking(monkeypatch, lacking=False)
    engine.generate([[8 + number] * 300 for number in range(3)], GREEDY)
    stream = engine.generate_stream([9] * 20, long)
    found = [next(stream).id]
    shrinking.lacking = True
    assert engine.load_prompt_cache(tmp_path / "f") == len(SYSTEM)
    assert shrinking.refused == 1
    found += [token.id for token in stream]
    assert found == expected
    before = engine._core.prefix.cached_tokens
    engine.generate([[*SYSTEM, 7]], GREEDY)
    assert engine._core.prefix.cached_tokens - before == len(SYSTEM)
