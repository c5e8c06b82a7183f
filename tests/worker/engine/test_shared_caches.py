"""The caches of two models on one device: each grows into what the other does not use."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.api.job_options import JobOptions
from jobs.api.request import ChatRequest
from jobs.operations import CHAT
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import WaitingSink, ask
from tests.worker.engine.reserved import load_reserved
from tests.worker.engine.stateful import files
from tests.worker.site import PATIENCE, wait_until
from worker.backend import Reservation
from worker.cache.state_dir import StateDir
from worker.cache.state_file import StateFile, checksum
from worker.engine.engine import EngineCore
from worker.engine.prompt_caches import keep_sessions
from worker.host.engine_host import EngineHost
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec

SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 4096}
LEASTS = 4  # so many times the least of a cache is there for both


@pytest.fixture
def specs(tmp_path: Path) -> list[ModelSpec]:
    paths = [make_checkpoint(tmp_path / name, "qwen3", **SHAPE) for name in ("one", "two")]
    return [ModelSpec(reference=str(path), dtype="fp32", max_batch=4) for path in paths]


@pytest.fixture
def host(specs: list[ModelSpec], monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineHost]:
    """Its caches never take more than there is, after whichever step."""
    probe = EngineHost(device="cpu")
    found = [probe.footprint(one) for one in specs]
    probe.close()
    fixed = sum(one.weights + one.activations for one in found)
    budget = fixed + LEASTS * found[0].least_cache
    host = EngineHost(device="cpu", memory=MemoryAmount(nbytes=budget))
    step, caches = EngineCore.step, host.device.caches

    def watched(self: EngineCore) -> bool:
        stepped = step(self)
        assert sum(one.taken for one in caches.shares) <= caches.total
        return stepped

    monkeypatch.setattr(EngineCore, "step", watched)
    yield host
    host.close()


def request(model: str, words: int, tokens: int, seed: int = 0) -> ChatRequest:
    text = " ".join(str((seed * 7919 + number) % 997) for number in range(words))
    asked = ask(text, max_tokens=tokens, ignore_eos=True, temperature=0)
    return asked.model_copy(update={"model": model})


def start(host: EngineHost, given: ChatRequest) -> WaitingSink:
    sink = WaitingSink()
    host.submit(CHAT, given, sink)
    return sink


def both(host: EngineHost, specs: list[ModelSpec]) -> list[str]:
    found = [host.footprint(one) for one in specs]
    part = LEASTS * found[0].least_cache // 2
    return [
        load_reserved(host, one, part, known).name for one, known in zip(specs, found, strict=True)
    ]


def test_memory_moves_to_the_model_that_has_jobs(host: EngineHost, specs: list[ModelSpec]) -> None:
    first, second = both(host, specs)
    total, least = host.device.caches.total, host.device.held[0].cache_least
    held: list[tuple[int, int]] = []
    for name in (first, second, first):
        for seed in range(6):
            start(host, request(name, 150, 2, seed)).wait()
        host._execute(lambda: None)  # the step has ended
        found = {one.owner: one.cache for one in host.device.held}
        held.append((found[first], found[second]))
    assert held[0][0] > total / 2 and held[0][1] == 0
    assert held[1][1] > total / 3 > least / 2 and held[1][0] < held[0][0]
    assert host.memory().cache_limit == total
    use = host.memory().caches[first]
    assert use.least == least and use.used <= use.limit <= total - held[2][1]


def test_jobs_of_both_models_that_want_all_memory_at_once_end_with_their_tokens(
    host: EngineHost, specs: list[ModelSpec]
) -> None:
    names = both(host, specs)
    given = [request(names[n % 2], 200 + 40 * (n % 4), 30, n) for n in range(8)]
    alone = [start(host, one).wait().text for one in given]
    sinks = [start(host, one) for one in given]
    assert [one.wait().text for one in sinks] == alone


def test_a_model_is_loaded_when_the_sequences_that_have_its_memory_have_ended(
    host: EngineHost, specs: list[ModelSpec]
) -> None:
    found = [host.footprint(one) for one in specs]
    first = load_reserved(host, specs[0], 2 * found[0].least_cache, found[0]).name
    rest = host.device.budget
    assert rest is not None
    # The second one leaves the first its least alone.
    fixed = rest - found[0].weights - found[0].activations - 2 * found[0].least_cache
    sinks = [start(host, request(first, 150, 200, n)) for n in range(4)]
    wait_until(lambda: host.device.held[0].cache > 2 * found[0].least_cache)
    reserved = threading.Event()

    def reserve() -> None:
        needs = Reservation(fixed, found[1].least_cache, found[1].least_cache)
        host.reserve(specs[1], needs)
        reserved.set()

    thread = threading.Thread(target=reserve)
    thread.start()
    for sink in sinks:
        assert sink.wait().usage is not None
    assert reserved.wait(PATIENCE)
    thread.join(PATIENCE)
    assert start(host, request(first, 40, 4)).wait().text
    second = host.load(specs[1]).name
    assert start(host, request(second, 40, 4)).wait().text


def test_other_models_are_stepped_while_state_of_one_that_is_unloaded_is_written(
    host: EngineHost, specs: list[ModelSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is theirs when all is written, and not before."""
    first, second = both(host, specs)
    host._execute(lambda: keep_sessions(host._engines[first], tmp_path / "states", 1 << 30))
    turn = request(first, 60, 4).model_copy(update={"job": JobOptions(session="s")})
    start(host, turn).wait()
    write, writing, slow = StateDir.write, threading.Event(), threading.Event()

    def slowly(self: StateDir, *args: Any) -> None:
        writing.set()
        assert slow.wait(PATIENCE)
        write(self, *args)

    monkeypatch.setattr(StateDir, "write", slowly)
    thread = threading.Thread(target=host.unload, args=(first,))
    thread.start()
    try:
        assert writing.wait(PATIENCE)
        before = {one.owner: one.cache for one in host.device.held}
        assert before[first] > 0
        sinks = [start(host, request(second, 200 + 40 * n, 30, n)) for n in range(4)]
        assert all(sink.wait().usage is not None for sink in sinks)
        found = {one.owner: one.cache for one in host.device.held}
        assert thread.is_alive() and host.health().alive
        assert found[first] == before[first] and found[second] > before[second]
    finally:
        slow.set()
        thread.join(PATIENCE)
    assert [one.owner for one in host.device.held] == [second]
    (file,) = files(tmp_path / "states")
    with open(file, "rb") as opened:
        assert checksum(opened, StateFile.open(file).crc) == StateFile.open(file).crc
    assert start(host, request(second, 40, 4)).wait().text
