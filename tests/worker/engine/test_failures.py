"""A sequence that fails, for whatever reason, does not affect the others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import PROMPT, ask
from tests.worker.panics import panic
from worker import Engine
from worker.backend import Outcome
from worker.cache import pool as cache_pool
from worker.chat.assembly import ChatAssembly
from worker.local.collect import CollectingSink


def fail() -> NoReturn:
    raise RuntimeError("requested by the test")


@pytest.mark.parametrize(
    ("fail", "reason"), [(fail, "RuntimeError: requested by the test"), (panic, "PanicException")]
)
def test_a_response_that_cannot_be_assembled_fails_alone(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[[], NoReturn],
    reason: str,
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    expected = engine.chat(ask(seed=1)).text
    whole = ChatAssembly._outcome

    def outcome(chat: ChatAssembly) -> Outcome:
        if chat._params.seed == 7:
            fail()
        return whole(chat)

    monkeypatch.setattr(ChatAssembly, "_outcome", outcome)
    sinks = [CollectingSink(), CollectingSink()]
    chats = [engine.submit(ask(seed=7, n=2), sinks[0]), engine.submit(ask(seed=1), sinks[1])]
    cancelled = engine.submit(ask(seed=7), CollectingSink())
    cancelled.cancel()
    while not all(chat.done for chat in (*chats, cancelled)):
        engine.step()
    with pytest.raises(JobError, match=f"the response could not be assembled: {reason}"):
        sinks[0].completion()
    assert sinks[1].completion().text == expected
    assert engine._core.running == engine._core.waiting == 0
    assert reason in caplog.text


def test_a_detokenizer_that_panics_fails_its_sequence_only(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    expected = engine.chat(ask(seed=1, temperature=1)).text
    sinks = [CollectingSink(), CollectingSink()]
    bad, good = (engine.submit(ask(seed=1, temperature=1), sink) for sink in sinks)
    broken = bad.sequences[0]._detokenizer
    monkeypatch.setattr(broken, "push", lambda _: panic())
    monkeypatch.setattr(broken, "finish", panic)
    while not (bad.done and good.done):
        engine.step()
    with pytest.raises(JobError, match="the engine failed: PanicException"):
        sinks[0].completion()
    assert sinks[1].completion().text == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_the_main_thread_is_not_taken_for_a_failed_job(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)

    def interrupted(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(engine._core.runner, "model", interrupted)
    with pytest.raises(error):
        engine.chat(ask())


def test_an_interrupted_step_leaves_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recurrent state has advanced then, and the number of computed tokens has not."""
    folder = make_checkpoint(tmp_path, "qwen3_5_text")
    engine = Engine.load(str(folder), device="cpu", dtype="fp32", max_batch=4)
    plain = Engine.load(str(folder), device="cpu", dtype="fp32", prefix_cache=False)
    greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    model: Any = engine._core.runner.model
    steps = 0

    def interrupted(*args: object) -> torch.Tensor:
        nonlocal steps
        logits: torch.Tensor = model(*args)
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return logits

    beside = engine.generate_stream([5, *PROMPT], greedy)
    text = [next(beside).id]
    monkeypatch.setattr(engine._core.runner, "model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([PROMPT], greedy)
    text += [token.id for token in beside]
    prompts = [[5, *PROMPT], PROMPT]
    first, second = (one.token_ids for one in plain.generate(prompts, greedy))
    assert text == first
    longer = [*PROMPT, *second]
    assert engine.generate([PROMPT, longer], greedy) == plain.generate([PROMPT, longer], greedy)


def test_a_slot_is_free_again_if_its_state_cannot_be_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=1)
    once = Sampling(temperature=0, max_tokens=3, ignore_eos=True)
    (expected,) = engine.generate([PROMPT], once)
    book = engine._core.book
    free = len(book._free)

    def full(*_: object, **__: object) -> NoReturn:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(cache_pool, "copy_blocks", full)
        assert engine.generate([PROMPT], once) == [expected]
        stream = engine.generate_stream(PROMPT, once)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert not engine.step()
    assert len(book._free) == free
    assert not engine._core.prefix._progress
    assert engine.generate([PROMPT], once) == [expected]


def test_a_sequence_too_large_for_the_cache_fails_alone_with_the_numbers(path: Path) -> None:
    probe = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    limit = probe._core.book.bytes_for_one(40)
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, cache_bytes=limit)
    sink = CollectingSink()
    long = engine.submit(ask("word " * 40), sink)
    short = engine.generate([PROMPT], Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    assert len(short[0].token_ids) == 5
    assert long.done
    with pytest.raises(JobError, match="kB") as caught:
        sink.completion()
    assert caught.value.code == "out_of_memory"


@pytest.mark.parametrize("error", [RuntimeError("boom"), torch.OutOfMemoryError("no room")])
def test_a_sequence_that_breaks_the_model_fails_alone(path: Path, error: Exception) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True)
    expected = engine.generate([PROMPT, [9, 9]], greedy)
    model, poison = engine._core.runner.model, 77

    class Fragile:
        def __call__(self, batch: Any, caches: Any) -> torch.Tensor:
            if (batch.token_ids == poison).any():
                raise error
            return model(batch, caches)

    engine._core.runner.model = Fragile()  # type: ignore[assignment]
    sink = CollectingSink()
    bias = {poison: -100}
    bad = engine.submit(ask(max_tokens=4, logit_bias={poison: 100}), sink)
    good = engine.generate([PROMPT, [9, 9]], greedy.model_copy(update={"logit_bias": bias}))
    assert [one.token_ids for one in good] == [one.token_ids for one in expected]
    while not bad.done:
        engine.step()
    with pytest.raises(JobError) as caught:
        sink.completion()
    assert caught.value.code in ("internal", "out_of_memory")


def test_memory_is_free_at_once_after_a_step_that_failed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    monkeypatch.setattr(engine._core.runner, "model", lambda *_: fail())
    with pytest.raises(JobError, match="requested by the test"):
        engine.generate([PROMPT], Sampling(temperature=0, max_tokens=8))
    caches: Any = engine._core.runner.pool.layers
    assert not any(cache.stored().keys.numel() for cache in caches)
    assert engine._core.book.bytes_held == 0


def test_the_log_of_a_failed_step_keeps_none_of_its_tensors(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Handlers may keep records, and an error in one the variables of the step."""
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    model: Any = engine._core.runner.model
    kept: list[weakref.ref[torch.Tensor]] = []

    def broken(*args: Any) -> torch.Tensor:
        if not kept:
            activation = torch.zeros(3)
            kept.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("no room\nand more about it")
        logits: torch.Tensor = model(*args)
        return logits

    monkeypatch.setattr(engine._core.runner, "model", broken)
    engine.generate([PROMPT, PROMPT[:3]], Sampling(temperature=0, max_tokens=2))
    assert "a step failed (no room); its sequences run again" in caplog.text
    gc.collect()
    assert kept[0]() is None


def test_nan_in_one_sequence_does_not_affect_others(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    poison = 250
    weights["model.embed_tokens.weight"][poison] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)
    greedy = Sampling(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={poison: -100})
    expected = engine.generate([PROMPT], greedy)
    named = f"tensor model.embed_tokens.weight in {path / 'model.safetensors'} holds NaN"
    with pytest.raises(JobError, match=f"not finite after 3 tokens: {named}"):
        engine.generate([[5, poison, 6]], greedy)
    sampling = [greedy] * 3
    with pytest.raises(JobError, match=named):
        engine.generate([PROMPT, [poison], PROMPT], sampling)
    assert engine.generate([PROMPT], greedy) == expected  # in the slot that was poisoned
    for call in (lambda: engine.prompt_logits([poison]), lambda: engine.score([poison], [5])):
        with pytest.raises(JobError, match=named):
            call()
        assert engine.generate([PROMPT], greedy) == expected
    engine.save_prompt_cache([5] * 20, tmp_path / "state")
    with pytest.raises(JobError, match=named):
        engine.score([poison], [5])
    assert engine.load_prompt_cache(tmp_path / "state") == 20  # clears the slot of the score
    assert engine.generate([PROMPT], greedy) == expected


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("largest", "says"),
    [
        (1e5, f"tensor {UP} in .* overflows float16; load with another dtype"),
        (6e4, "all weights are finite: a computation overflows float16; load with another dtype"),
    ],
)
def test_an_overflowing_dtype_is_named(tmp_path: Path, largest: float, says: str) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path, "llama")
    weights = load_file(path / "model.safetensors")
    weights[UP] *= largest / weights[UP].abs().max()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    engine = Engine.load(str(path), device="cpu", dtype="fp16")
    with pytest.raises(JobError, match=says):
        engine.generate([PROMPT], Sampling(temperature=0, max_tokens=8))


def test_a_closed_engine_refuses_every_call(path: Path) -> None:
    engine = Engine.load(str(path), device="cpu", dtype="fp32")
    engine.close()
    greedy = Sampling(temperature=0, max_tokens=1)
    calls: list[Callable[[], object]] = [
        lambda: engine.chat(ask()),
        lambda: next(engine.stream(ask())),
        lambda: engine.generate([PROMPT], greedy),
        lambda: next(engine.generate_stream(PROMPT, greedy)),
        lambda: engine.score(PROMPT, PROMPT),
        lambda: engine.prompt_logits(PROMPT),
    ]
    for call in calls:
        with pytest.raises(JobError, match="the engine was closed") as caught:
            call()
        assert caught.value.code == "cancelled"
