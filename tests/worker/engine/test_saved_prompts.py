"""The state of a prompt for a file: computed alone, in every second step, with others between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import KINDS, make_checkpoint
from worker import Engine
from worker.device import Device
from worker.engine import prompt_caches
from worker.engine.engine import EngineCore
from worker.engine.sequence import Sequence, TokenEvent
from worker.layers.batch import Batch
from worker.model_spec import ModelSpec

SYSTEM = [5 + i % 90 for i in range(200)]
CHUNKS = [64, 64, 64, 8]
GREEDY = Sampling(temperature=0, max_tokens=30, ignore_eos=True)


def load(path: Path, **options: Any) -> Engine:
    options = {"dtype": "bf16", "max_batch": 3, **options}
    return Engine.load(str(path), device="cpu", **options)


def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The lengths of the chunks and single tokens of each forward pass."""
    model: Any = engine._core.runner.model
    lengths: list[list[int]] = []

    def watched(batch: Batch, layers: Any) -> torch.Tensor:
        singles = [1] * batch.decode.size if batch.decode else []
        lengths.append([*singles, *[chunk.length for chunk in batch.chunks]])
        logits: torch.Tensor = model(batch, layers)
        return logits

    monkeypatch.setattr(engine._core.runner, "model", watched)
    return lengths


@pytest.mark.parametrize("kind", KINDS)
def test_others_generate_between_its_steps_and_change_no_bit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", KINDS[kind])
    idle, busy = load(folder), load(folder)
    idle.save_prompt_cache(SYSTEM, tmp_path / "idle")
    expected = [one.token_ids for one in load(folder).generate([SYSTEM[:70], [7, 8]], GREEDY)]
    streams = [busy.generate_stream(prompt, GREEDY) for prompt in (SYSTEM[:70], [7, 8])]
    found = [[next(stream).id] for stream in streams]
    lengths = watch(busy, monkeypatch)
    busy.save_prompt_cache(SYSTEM, tmp_path / "busy")
    alone, together = lengths[::2], lengths[1::2]
    if alone[0] == [1, 1]:
        alone, together = together, alone
    assert alone == [[count] for count in CHUNKS]
    assert len(together) >= len(CHUNKS) - 1 and all(one == [1, 1] for one in together)
    assert (tmp_path / "busy").read_bytes() == (tmp_path / "idle").read_bytes()
    for ids, stream in zip(found, streams, strict=True):
        ids += [token.id for token in stream]
    assert found == expected


def test_one_that_is_cancelled_leaves_nothing(path: Path) -> None:
    core = load(path)._core
    free = len(core.book._free)
    events: list[TokenEvent] = []
    sequence, saver = prompt_caches.saving(core, SYSTEM, events.append)
    core.add([sequence])
    for _ in range(3):
        core.step()
    assert core.waiting == 1 and core.running == 0
    sequence.cancel()
    assert not core.step()
    saver.drop()
    assert events[-1].error is not None and events[-1].error.code == "cancelled"
    assert (core.waiting, len(core.book._free)) == (0, free)
    assert not core.step() and not core.runner.pool.kept


def test_one_without_room_waits_for_it_and_changes_no_bit(path: Path, tmp_path: Path) -> None:
    load(path).save_prompt_cache([9] * 300, tmp_path / "idle")
    one = load(path)._core.book.bytes_for_one(200)
    engine = load(path, cache_bytes=2 * one)
    stream = engine.generate_stream([7] * 150, GREEDY)
    found = [next(stream).id]
    assert engine.save_prompt_cache([9] * 300, tmp_path / "busy") == 300
    assert (tmp_path / "busy").read_bytes() == (tmp_path / "idle").read_bytes()
    found += [token.id for token in stream]
    assert found == load(path).generate([[7] * 150], GREEDY)[0].token_ids


def test_one_that_never_fits_fails_with_the_sizes_and_others_go_on(
    path: Path, tmp_path: Path
) -> None:
    one = load(path)._core.book.bytes_for_one(200)
    engine = load(path, cache_bytes=2 * one)
    stream = engine.generate_stream([7] * 150, GREEDY)
    found = [next(stream).id]
    with pytest.raises(JobError, match=r"of 450 tokens needs .*, the limit is") as caught:
        engine.save_prompt_cache([9] * 450, tmp_path / "f")
    assert caught.value.code == "out_of_memory" and not (tmp_path / "f").exists()
    assert engine._core.running == 1  # it was not waited for
    found += [token.id for token in stream]
    assert found == load(path).generate([[7] * 150], GREEDY)[0].token_ids


def test_one_that_waits_for_room_goes_before_newcomers(path: Path) -> None:
    core = load(path, cache_bytes=2 * load(path)._core.book.bytes_for_one(200))._core
    others: list[list[TokenEvent]] = []

    def newcomer() -> None:
        others.append([])
        params = core.sampling_params(GREEDY, [7] * 120)
        core.add([Sequence([7] * 120, params, listener=others[-1].append)])

    newcomer()
    core.step()
    events: list[TokenEvent] = []
    sequence, saver = prompt_caches.saving(core, [9] * 300, events.append)
    core.add([sequence])
    for _ in range(60):
        newcomer()
        core.step()
    saver.drop()
    assert [event.error for event in events] == [None]
    while core.step():
        pass
    assert all(len(one) == 30 and one[-1].error is None for one in others)


def test_one_waits_for_the_memory_of_another_model(path: Path) -> None:
    """Its own model runs a sequence meanwhile, and goes on."""
    device = Device(torch.device("cpu"))
    spec = ModelSpec(reference=str(path), dtype="bf16", max_batch=3)
    cores = [EngineCore.load(spec, device=device) for _ in range(2)]
    book = cores[0].book
    device.caches.budget = book.bytes_for_one(180) * 3
    for core in cores:
        core.share.least = book.bytes_for_one(16)

    def start(core: EngineCore, tokens: int, most: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        params = core.sampling_params(GREEDY.model_copy(update={"max_tokens": most}), [7] * tokens)
        core.add([Sequence([7] * tokens, params, listener=events.append)])
        core.step()
        return events

    mine, its = start(cores[0], 150, 200), start(cores[1], 250, 60)
    events: list[TokenEvent] = []
    sequence, saver = prompt_caches.saving(cores[0], [9] * 200, events.append)
    cores[0].add([sequence])
    waited = 0
    while not sequence.ended:
        waited += sequence.slot is None
        for core in cores:
            core.step()
        assert cores[0].bytes_held + cores[1].bytes_held <= device.caches.total
        assert waited < 200
    assert waited > 10 and its[-1].last and not mine[-1].last
    assert [event.error for event in events] == [None]
    saver.drop()
    while any([core.step() for core in cores]):
        pass
    assert len(mine) == 200 and len(its) == 60


def test_one_that_fails_in_a_step_fails_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    model: Any = engine._core.runner.model

    def fragile(batch: Batch, layers: Any) -> torch.Tensor:
        if len(batch.token_ids) == CHUNKS[-1]:
            raise RuntimeError("requested by the test")
        logits: torch.Tensor = model(batch, layers)
        return logits

    stream = engine.generate_stream([7, 8], GREEDY)
    found = [next(stream).id]
    with monkeypatch.context() as patch:
        patch.setattr(engine._core.runner, "model", fragile)
        with pytest.raises(JobError, match="requested by the test"):
            engine.save_prompt_cache(SYSTEM, tmp_path / "f")
    found += [token.id for token in stream]
    assert found == load(path).generate([[7, 8]], GREEDY)[0].token_ids
    assert engine.save_prompt_cache(SYSTEM, tmp_path / "f") == len(SYSTEM)


def test_one_is_computed_again_after_a_step_of_others_failed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    load(path).save_prompt_cache(SYSTEM, tmp_path / "plain")
    model: Any = engine._core.runner.model
    failures = iter([True])

    def fragile(batch: Batch, layers: Any) -> torch.Tensor:
        if len(batch.token_ids) == 2 and next(failures, False):
            raise RuntimeError("requested by the test")
        logits: torch.Tensor = model(batch, layers)
        return logits

    streams = [engine.generate_stream(prompt, GREEDY) for prompt in ([7, 8], [9])]
    found = [[next(stream).id] for stream in streams]
    monkeypatch.setattr(engine._core.runner, "model", fragile)
    engine.save_prompt_cache(SYSTEM, tmp_path / "f")
    for ids, stream in zip(found, streams, strict=True):
        ids += [token.id for token in stream]
    assert next(failures, None) is None
    assert (tmp_path / "f").read_bytes() == (tmp_path / "plain").read_bytes()
    assert found == [one.token_ids for one in load(path).generate([[7, 8], [9]], GREEDY)]
