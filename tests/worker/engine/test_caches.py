"""Every kind of cache under load: other sequences never change the output of a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.request import ChatRequest
from jobs.api.sampling import Sampling
from tests.worker.checkpoints import KINDS, make_shallow_checkpoint
from worker import Engine
from worker.chat.generation import start_chat
from worker.device import Device
from worker.engine.engine import EngineCore
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.local.collect import CollectingSink
from worker.model_spec import ModelSpec

# A family of each kind of cache, and those whose attention or recurrence is computed in other ways.
FAMILIES = (*KINDS.values(), "gpt_oss", "qwen3_next")
TOKENS = 80
GREEDY = Sampling(temperature=0, max_tokens=TOKENS, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7] for i in range(4)]
LONG = [prompt * 70 for prompt in PROMPTS]


@pytest.fixture(scope="module", params=FAMILIES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shallow_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture
def engine(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)


def test_preemption_does_not_change_the_output(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.generate(LONG, GREEDY)
    limit = engine._core.book.bytes_for_one(270) * 3  # enough for three to start, not to finish
    tight = Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4, cache_bytes=limit)
    preempted: list[Sequence] = []
    preempt = Scheduler._preempt

    def watched(self: Scheduler, sequence: Sequence) -> None:
        preempted.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", watched)
    assert tight.generate(LONG, GREEDY) == expected
    assert any(len(sequence.output_ids) > 40 for sequence in preempted)


def test_pauses_for_interactive_requests_change_neither_tokens_nor_streams(
    path: Path, engine: Engine
) -> None:
    def ask(text: str, priority: Any, tokens: int) -> ChatRequest:
        return ChatRequest(
            model="m",
            messages=[{"role": "user", "content": text}],
            max_tokens=tokens,
            temperature=1.0,
            seed=len(text),
            ignore_eos=True,
            job={"priority": priority},
        )

    requests = [ask("b" * n, "bulk", 60) for n in (1, 2)]
    requests += [ask("c" * n, "interactive", 20) for n in (3, 4, 5)]
    expected = [engine.chat(request).text for request in requests]
    core = EngineCore.load(
        ModelSpec(reference=str(path), dtype="fp32", max_batch=2),
        device=Device(torch.device("cpu")),
        preempt=True,
    )
    sinks = [CollectingSink() for _ in requests]
    generations = [
        start_chat(core, request, sink) for request, sink in zip(requests[:2], sinks, strict=False)
    ]
    for _ in range(10):
        core.step()
    first, second = (one.sequences[0] for one in generations)
    for request, sink in zip(requests[2:], sinks[2:], strict=True):
        start_chat(core, request, sink)
    core.step()
    assert core.running == 2
    assert second.computed > 0 and first.computed == 0  # one keeps its cache, one starts again
    while core.step():
        pass
    assert [sink.completion().text for sink in sinks] == expected
    assert ["".join(delta.content for delta in sink.take()) for sink in sinks] == expected
    core.close()


def test_cancelled_neighbours_do_not_change_the_output(engine: Engine) -> None:
    sampling = GREEDY.model_copy(update={"max_tokens": 60})
    expected = engine.generate(PROMPTS[:3], sampling)
    request = ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "a neighbour " * 9}],
        max_tokens=400,
        ignore_eos=True,
    )
    staying = engine.submit(request, CollectingSink())  # while it runs, storage is not freed
    for steps in (2, 4, 40):
        neighbour = engine.submit(request, CollectingSink())
        for _ in range(steps):
            engine.step()
        neighbour.cancel()
        assert engine.generate(PROMPTS[:3], sampling) == expected  # in the slot that it used
        assert neighbour.done
        assert not staying.done


def test_a_stream_equals_the_completion(engine: Engine) -> None:
    request = ChatRequest(
        model="m",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=60,
        temperature=1.2,
        seed=3,
        ignore_eos=True,
    )
    chunks = [choice.delta for chunk in engine.stream(request) for choice in chunk.choices]
    assert len(chunks) > 30
    message = engine.chat(request).choices[0].message
    assert "".join(delta.content or "" for delta in chunks) == (message.content or "")
