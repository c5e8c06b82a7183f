"""Steps that are interrupted anywhere, or fail before their forward pass."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from jobs.operations import CHAT
from tests.waiting import PATIENCE
from tests.worker.checkpoints import make_shallow_checkpoint
from tests.worker.engine.chat_requests import WaitingSink, ask
from worker import ChatSession, Engine
from worker import device as devices
from worker.cache import pool
from worker.engine.engine import EngineCore
from worker.host.engine_host import EngineHost
from worker.model_spec import ModelSpec

GREEDY = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
FAMILIES = ["qwen3", "gemma3_text", "qwen3_5_text"]  # full, window, recurrent caches
SEEDS = 12
STATE_FILES = {
    *("engine.py", "scheduler.py", "wait_queue.py", "prefix_cache.py", "prefix_store.py"),
    *(
        "book.py",
        "pool.py",
        "copies.py",
        "page_numbers.py",
        "page_table.py",
        "recovery.py",
        "kv_cache.py",
        "runner.py",
        "scheduled.py",
    ),
    *("recurrent_cache.py", "cache.py", "speculation.py", "sampler.py", "batch.py", "pipeline.py"),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow_checkpoint(tmp_path_factory.mktemp("m") / request.param, request.param)


def load(folder: Path, **options: Any) -> Engine:
    options = {"dtype": "fp32", "max_batch": 3, "context": 256, **options}
    return Engine.load(str(folder), device="cpu", **options)


class Interrupt:
    """Raises `error` at the line number `at` that the modules of STATE_FILES execute."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self._left, self._error = at, error
        self.raised_at = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        known = "/worker/" in path and os.path.basename(path) in STATE_FILES
        return self._line if known else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._left -= event == "line"
        if self._left == 0 and event == "line":
            sys.settrace(None)
            self.raised_at = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise self._error("injected")
        return self._line


@pytest.mark.parametrize("overlaps", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_step_that_ends_at_any_line_changes_no_answer(
    folder: Path, error: type[BaseException], overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overlaps and folder.name == "qwen3_5_text":
        pytest.skip("steps with recurrent layers do not overlap")
    monkeypatch.setattr(devices, "CPU_LIMITS", replace(devices.CPU_LIMITS, overlaps=overlaps))
    plain = load(folder, prefix_cache=False)
    expected: dict[tuple[int, ...], list[int]] = {}
    for seed in range(SEEDS):
        chosen = random.Random(f"{seed}")
        room = plain._core.book.bytes_for_one(256)
        engine = load(folder, cache_bytes=int(room * chosen.choice([2.5, 12])))
        prompts = []
        for _ in range(5):
            begin = [chosen.randint(1, 2)] * chosen.choice([16, 48, 64])
            prompts.append(begin + [chosen.randint(1, 3) for _ in range(chosen.randint(1, 9))])
        answers: list[list[Any]] = [[] for _ in prompts]
        sequences = []
        for prompt, events in zip(prompts, answers, strict=True):
            params = engine._core.sampling_params(GREEDY, prompt)
            sequences.append(engine._sequence(prompt, params, 0, events.append))
        engine._core.add(sequences[:3])
        for _ in range(chosen.randint(0, 12)):
            engine.step()
        engine._core.add(sequences[3:])
        interrupt = Interrupt(int(10 ** chosen.uniform(0, 3)), error)
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            for _ in range(3):
                engine.step()
        except error:
            pass
        finally:
            sys.settrace(before)
        for _ in range(500):
            if not engine.step():
                break
        for prompt, events in zip(prompts, answers, strict=True):
            key = tuple(prompt)
            if key not in expected:
                (one,) = plain.generate([prompt], GREEDY)
                expected[key] = one.token_ids
            tokens = [event.sampled.token_id for event in events if event.sampled is not None]
            whole = expected[key]
            if events[-1].error is not None:  # it was alone in the step
                assert error is MemoryError and events[-1].error.code == "out_of_memory"
                whole = whole[: len(tokens)]
            assert tokens == whole, (seed, interrupt.raised_at)
        (again,) = engine.generate([prompts[0]], GREEDY)
        assert again.token_ids == expected[tuple(prompts[0])]
        core = engine._core
        assert core.book._used == {} and core.prefix._progress == {}, interrupt.raised_at
        kept = core.book.kept
        assert kept.nbytes == sum(block.nbytes for block in kept._blocks.values())
        assert not any(block.references for block in kept._blocks.values()), interrupt.raised_at
        assert core.runner.pool.kept.keys() == numbers_of(core), interrupt.raised_at


def numbers_of(core: EngineCore) -> set[int]:
    """Of the copies that the store holds."""
    return {copy.number for block in core.book.kept._blocks.values() for copy in block.copies}


def test_pinned_state_survives_an_interrupt(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [1, 2, 3, 4] * 20
    load(folder).save_prompt_cache(prompt, tmp_path / "f")
    engine = load(folder)
    engine.load_prompt_cache(tmp_path / "f")
    pinned = engine._core.book.kept.pinned_bytes
    once(monkeypatch, pool, "write_pages", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[*prompt, 9]], GREEDY)
    (answer,) = engine.generate([[*prompt, 9]], GREEDY)
    (alone,) = load(folder, prefix_cache=False).generate([[*prompt, 9]], GREEDY)
    assert answer.token_ids == alone.token_ids
    assert engine._core.prefix.cached_tokens > 0
    assert engine._core.book.kept.pinned_bytes == pinned


def once(patch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException]) -> None:
    """The next call of a method raises, after it has done its work."""
    whole: Callable[..., Any] = getattr(owner, name)

    def fail(*args: Any, **options: Any) -> Any:
        patch.setattr(owner, name, whole)
        whole(*args, **options)
        raise error("injected")

    patch.setattr(owner, name, fail)


def test_a_token_that_is_interrupted_on_its_way_is_not_lost_silently(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    params = engine._core.sampling_params(GREEDY, [1, 2, 3])
    events: list[Any] = []
    sequence = engine._sequence([1, 2, 3], params, 0, events.append)
    other = engine._sequence(
        [4, 5], engine._core.sampling_params(GREEDY, [4, 5]), 0, lambda event: None
    )
    engine._core.add([sequence, other])
    engine.step()
    once(monkeypatch, sequence._detokenizer, "push", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    while engine.step():
        pass
    assert len(sequence.output_ids) == 2 and len(events) == 2
    assert "interrupted while a token was handed over" in str(events[-1].error)
    assert len(other.output_ids) == 6


def test_memory_that_cannot_be_allocated_fails_one_request_after_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = EngineHost(device="cpu")
    info = host.load(ModelSpec(reference=str(folder), dtype="fp32"))
    request = ask(max_tokens=4).model_copy(update={"model": info.name})
    with monkeypatch.context() as patch:
        patch.setattr(np, "zeros", no_memory)
        sinks = [WaitingSink(), WaitingSink()]
        for sink in sinks:
            host.submit(CHAT, request, sink)
        for sink in sinks:
            with pytest.raises(JobError, match="no memory") as caught:
                sink.wait()
            assert caught.value.code == "out_of_memory"
    assert host.health().alive
    sink = WaitingSink()
    host.submit(CHAT, request, sink)
    assert sink.wait().usage is not None
    host.close()


def no_memory(*args: Any, **options: Any) -> Any:
    raise MemoryError("no memory")


def test_calls_that_wait_while_the_engine_is_closed_say_so(path: Path, tmp_path: Path) -> None:
    engine = load(path)
    calls: list[Callable[[], Any]] = [
        lambda: engine.score([1], [2]),
        lambda: engine.prompt_logits([1, 2]),
        lambda: engine.save_prompt_cache([1] * 20, tmp_path / "f"),
    ]
    errors: list[JobError] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except JobError as error:
            errors.append(error)

    with engine._lock:
        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.2)
            assert thread.is_alive()
        engine._core.close()
    for thread in threads:
        thread.join()
    assert [error.code for error in errors] == ["cancelled"] * 3


def test_a_stream_that_the_garbage_collector_closes_in_a_step_blocks_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(path)
    session = ChatSession(engine, temperature=0, max_tokens=20, ignore_eos=True)
    gc.collect()
    gc.freeze()  # each step collects the objects that are made from now on
    owner: dict[str, Any] = {"stream": session.stream("Hello!")}
    owner["itself"] = owner
    for _ in range(3):
        next(owner["stream"])
    step = EngineCore.step

    def collect(core: EngineCore) -> bool:
        gc.collect()
        return step(core)

    gc.disable()
    try:
        del owner
        monkeypatch.setattr(EngineCore, "step", collect)
        done = threading.Thread(target=engine.generate, args=([[1, 2, 3]], GREEDY), daemon=True)
        done.start()
        done.join(PATIENCE)
        assert not done.is_alive()
    finally:
        monkeypatch.setattr(EngineCore, "step", step)
        gc.unfreeze()
        gc.enable()
    (turn,) = session.turns
    assert turn.finish_reason == "cancelled" and turn.answer is not None
    assert session.respond("And then?").usage is not None
    assert len(session.turns) == 2
