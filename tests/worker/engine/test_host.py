"""EngineHost: one thread loads and steps for any number of callers."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.api.job_options import JobOptions
from jobs.api.request import ChatRequest
from jobs.api.score_request import Item, ScoreRequest
from jobs.errors import JobError
from jobs.operations import CHAT, SCORE
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import WaitingSink, ask
from tests.worker.panics import TRIGGER, make_fragile
from tests.worker.site import PATIENCE, wait_until
from worker.engine.engine import EngineCore
from worker.host.engine_host import EngineHost
from worker.layers.cache import Size
from worker.local.collect import CollectingSink
from worker.model_spec import ModelSpec
from worker.processes.resident import resident_bytes
from worker.prompt.builder import Prompt, PromptBuilder
from worker.scoring.encoding import ItemEncoder, Targets


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost(device="cpu")
    yield host
    host.close()


def spec(path: Path) -> ModelSpec:
    return ModelSpec(reference=str(path), dtype="fp32", max_batch=4)


def chat(host: EngineHost, request: ChatRequest) -> str:
    sink = WaitingSink()
    host.submit(CHAT, request, sink)
    return sink.wait().text


def test_an_idle_engine_frees_the_storage_of_its_cache(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.host.engine_host.LONGEST_SLEEP_SECONDS", 0.01)
    name = host.load(spec(path)).name
    chat(host, ask("question").model_copy(update={"model": name}))
    book = host._engines[name].book
    wait_until(lambda: host.memory().cache == book.sizes.storage(Size(0, 0, len(book.kept))) > 0)


def test_an_unloaded_model_leaves_no_memory_and_can_be_loaded_again(
    host: EngineHost, path: Path, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    large = spec(make_checkpoint(tmp_path / "large", "qwen3", **sizes))
    other = host.load(spec(path)).name
    request = ask("question").model_copy(update={"model": "large", "temperature": 0.0})
    answers, loaded, left = set(), 0, []
    for _ in range(3):  # the first two also take what stays: modules, the allocator's memory
        info = host.load(large)
        engine = weakref.ref(host._engines[info.name])
        answers.add(chat(host, request))
        loaded, tokens = resident_bytes(), host.health().tokens_generated
        host.unload(info.name)
        left.append(resident_bytes())
        assert engine() is None
        assert [one.owner for one in host.device.held] == [other]
        # The answer ends before its last token is counted.
        assert host.health().tokens_generated >= tokens > 0
        with pytest.raises(JobError, match=f"model 'large' is not loaded; loaded: {other}"):
            host.room("large", bulk=False)
    assert info.weight_bytes > 50e6
    assert loaded - left[2] > 0.9 * info.weight_bytes
    assert left[2] - left[1] < 0.1 * info.weight_bytes
    assert len(answers) == 1
    chat(host, ask("question").model_copy(update={"model": other}))


def test_many_threads_submit_and_one_thread_steps(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: set[str] = set()
    step = EngineCore.step

    def watched(self: EngineCore) -> bool:
        steppers.add(threading.current_thread().name)
        return step(self)

    monkeypatch.setattr(EngineCore, "step", watched)
    info = host.load(spec(path))
    requests = [ask(f"question {i}", seed=i, temperature=1.0) for i in range(8)]
    requests = [r.model_copy(update={"model": info.name}) for r in requests]
    expected = [chat(host, request) for request in requests]
    texts: dict[int, str] = {}

    def work(i: int) -> None:
        texts[i] = chat(host, requests[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert [texts[i] for i in range(8)] == expected
    wait_until(lambda: not host.health().running)  # the end of an answer comes before its step's
    health = host.health()
    assert health.alive and health.progress > 0
    assert steppers == {"engine"}
    with pytest.raises(JobError, match=f"loaded: {info.name}") as caught:
        host.submit(CHAT, ask().model_copy(update={"model": "other"}), CollectingSink())
    assert caught.value.code == "model_not_found"
    host.close()
    assert not host.health().alive


def test_short_requests_make_room_for_as_many_as_ended_lately(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.slots.RECENT_SECONDS", 3600.0)
    info = host.load(spec(path))
    assert host.room(info.name, bulk=False) == 6  # a batch of 4 and half of it
    for _ in range(5):
        chat(host, ask(max_tokens=1).model_copy(update={"model": info.name}))
    wait_until(lambda: host.room(info.name, bulk=False) == 9)


def test_a_loaded_model_is_spared_from_garbage_collection(host: EngineHost, path: Path) -> None:
    host.load(spec(path))
    assert gc.get_freeze_count() > 100_000
    assert len(gc.get_objects()) < gc.get_freeze_count()
    host.close()
    assert gc.get_freeze_count() == 0


def test_closing_fails_running_requests_and_drops_the_models(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EngineCore.step

    def slow(self: EngineCore) -> bool:
        time.sleep(0.01)
        return step(self)

    monkeypatch.setattr(EngineCore, "step", slow)
    info = host.load(spec(path))
    sink = WaitingSink()
    request = ask(max_tokens=500, ignore_eos=True).model_copy(update={"model": info.name})
    host.submit(CHAT, request, sink)
    wait_until(lambda: host.health().running)
    host.close()
    with pytest.raises(JobError, match="the engine was closed") as caught:
        sink.wait()
    assert caught.value.code == "cancelled"
    with pytest.raises(JobError, match="loaded: none"):
        host.room(info.name, bulk=False)


def test_commands_fail_once_the_engine_thread_has_died(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: EngineCore) -> bool:
        raise RuntimeError("requested by the test")

    monkeypatch.setattr(EngineCore, "step", broken)
    host.load(spec(path))
    wait_until(lambda: not host.health().alive)
    with pytest.raises(JobError, match="RuntimeError: requested by the test"):
        host.load(spec(path))
    health = host.health()
    assert not health.alive and health.error == "RuntimeError: requested by the test"


def test_a_prompt_on_which_the_tokenizer_panics_fails_alone(
    host: EngineHost, tmp_path: Path
) -> None:
    make_fragile(make_checkpoint(tmp_path / "m"))
    host.load(spec(tmp_path / "m"))
    sinks = [WaitingSink(), WaitingSink(), WaitingSink()]
    for sink, text in zip(sinks, ("hello", TRIGGER, "hello"), strict=True):
        host.submit(CHAT, ask(text, seed=1), sink)
    with pytest.raises(JobError, match="retry-limit-in-match") as caught:
        sinks[1].wait()
    assert (caught.value.code, caught.value.param) == ("invalid_request", "messages")
    assert sinks[0].wait().text == sinks[2].wait().text
    assert host.health().alive


def test_a_request_that_is_still_prepared_takes_room_and_can_be_cancelled(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = host.load(spec(path))
    build, release = PromptBuilder.build, threading.Event()

    def slow(self: PromptBuilder, request: ChatRequest) -> Prompt:
        assert release.wait(PATIENCE)
        return build(self, request)

    monkeypatch.setattr(PromptBuilder, "build", slow)
    request = ask(n=2, max_tokens=500, ignore_eos=True)
    request = request.model_copy(update={"model": info.name})
    room = host.room(info.name, bulk=False)
    sinks = [WaitingSink(), WaitingSink(), WaitingSink()]
    running, waiting, last = (host.submit(CHAT, request, sink) for sink in sinks)
    assert host.room(info.name, bulk=False) == room - 6
    assert host.health().waiting == 6
    running.cancel()
    waiting.cancel()
    release.set()
    for sink in sinks[:2]:
        with pytest.raises(JobError) as caught:
            sink.wait()
        assert caught.value.code == "cancelled"
    last.cancel()
    with pytest.raises(JobError):
        sinks[2].wait()
    wait_until(lambda: host.room(info.name, bulk=False) == room)


def bulk(request: ChatRequest) -> ChatRequest:
    return request.model_copy(update={"job": JobOptions(priority="bulk")})


def test_an_interactive_request_ends_before_bulk_ones_that_fill_the_batch(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine stands still from when the batch is full until the request has come, and 100
    steps later, of 200, until the others are looked at."""
    step, submitted, seen = EngineCore.step, threading.Event(), threading.Event()
    steps: list[None] = []

    def waits(self: EngineCore) -> bool:
        if self.running == 4:
            assert submitted.wait(PATIENCE)
            steps.append(None)
            assert len(steps) < 100 or seen.wait(PATIENCE)
        return step(self)

    monkeypatch.setattr(EngineCore, "step", waits)
    info = host.load(spec(path))
    long = ask(max_tokens=200, ignore_eos=True).model_copy(update={"model": info.name})
    sinks = [WaitingSink() for _ in range(6)]
    for sink in sinks:
        host.submit(CHAT, bulk(long), sink)
    wait_until(lambda: host.health().running == 4)
    assert host.room(info.name, bulk=True) == 0
    assert host.room(info.name, bulk=False) == 6
    short = long.model_copy(update={"max_tokens": 2, "n": 3})
    interactive = WaitingSink()
    host.submit(CHAT, short, interactive)
    wait_until(lambda: host.health().waiting == 5)
    submitted.set()
    assert len(interactive.wait().choices) == 3
    outcomes = [sink.outcome for sink in sinks]
    seen.set()
    assert outcomes == [None] * 6
    for sink in sinks:
        assert sink.wait().usage is not None


def test_interactive_prompts_are_prepared_before_bulk_prompts(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = host.load(spec(path))
    build, release = PromptBuilder.build, threading.Event()
    built: list[str] = []

    def slow(self: PromptBuilder, request: ChatRequest) -> Prompt:
        built.append(request.job.priority)
        assert release.wait(PATIENCE)
        return build(self, request)

    monkeypatch.setattr(PromptBuilder, "build", slow)
    request = ask(max_tokens=1).model_copy(update={"model": info.name})
    sinks = [WaitingSink() for _ in range(20)]
    submitted = [bulk(request)] * 3 + [request] * 17
    for one, sink in zip(submitted, sinks, strict=True):
        host.submit(CHAT, one, sink)
        wait_until(lambda: built)  # the first one is prepared at once
    release.set()
    for sink in sinks:
        sink.wait()
    chat = "interactive"
    assert built == ["bulk", *[chat] * 14, "bulk", chat, "bulk", chat, chat]


def test_prompts_are_prepared_between_the_items_of_a_scoring_request(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = host.load(spec(path))
    build, targets, release = PromptBuilder.build, ItemEncoder.targets, threading.Event()
    prepared: list[str] = []

    def built(self: PromptBuilder, request: ChatRequest) -> Prompt:
        prepared.append("chat")
        return build(self, request)

    def slow(self: ItemEncoder, item: Item) -> list[Targets]:
        prepared.append("item")
        assert release.wait(PATIENCE)
        return targets(self, item)

    monkeypatch.setattr(PromptBuilder, "build", built)
    monkeypatch.setattr(ItemEncoder, "targets", slow)
    text = {"type": "perplexity", "text": [1, 2, 3]}
    scoring = WaitingSink()
    host.submit(SCORE, ScoreRequest(model=info.name, items=[text] * 6), scoring)
    wait_until(lambda: prepared)
    request = ask(max_tokens=1).model_copy(update={"model": info.name})
    sinks = [WaitingSink() for _ in range(3)]
    for sink in sinks:
        host.submit(CHAT, request, sink)
    release.set()
    for sink in sinks:
        sink.wait()
    wait_until(lambda: scoring.outcome is not None)
    assert prepared == ["item", "item", "chat", "item", "chat", "item", "chat", "item", "item"]
