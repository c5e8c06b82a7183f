"""The soft ceiling frees what nothing needs, and says so once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.operations import CHAT
from tests.worker.engine.chat_requests import WaitingSink, ask
from tests.worker.engine.reserved import load_reserved
from worker.device import Device
from worker.host import soft_ceiling
from worker.host.engine_host import EngineHost
from worker.host.soft_ceiling import SoftCeiling
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec

BUDGET = MemoryAmount(nbytes=1000)


class Model:
    """Has so many bytes of prefixes that no sequence uses."""

    def __init__(self, memory: Memory, unused: int) -> None:
        self.generations, self.peak_bytes = 0, 990
        self._memory, self.unused = memory, unused

    def evict(self, nbytes: int) -> int:
        evicted = min(nbytes, self.unused)
        self.unused -= evicted
        self._memory.free += evicted  # the allocator keeps it
        return evicted


class Memory:
    """The memory of a device: in use, and of this free in the allocator."""

    def __init__(self) -> None:
        self.active = self.free = self.looks = 0

    def in_use(self) -> int:
        self.looks += 1
        return self.active

    def empty(self) -> None:
        self.active -= self.free
        self.free = 0


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def ceiling(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> SoftCeiling:
    ceiling = SoftCeiling(Device(torch.device("cpu"), BUDGET))
    monkeypatch.setattr(ceiling, "in_use", memory.in_use)
    monkeypatch.setattr(ceiling, "_empty", memory.empty)
    return ceiling


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_it_warns_once_until_the_memory_was_below_again(
    ceiling: SoftCeiling, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(memory, unused=0)
    found = []
    for active in (900, 901, 950, 999, 900, 901):
        memory.active = active
        model.generations += 1
        ceiling.check([model])
        found.append(len(warnings(caplog)))
    assert found == [0, 1, 1, 1, 1, 2]
    assert (
        "have 901 bytes in use, more than 90% of --memory 1.0 kB (weights 0 bytes, "
        in (warnings(caplog)[0])
    )
    assert "peak of the process 990 bytes)" in warnings(caplog)[0]


def test_prefixes_are_dropped_for_what_free_memory_does_not_give(
    ceiling: SoftCeiling, memory: Memory
) -> None:
    models = [Model(memory, unused=30), Model(memory, unused=500)]
    memory.active, memory.free = 1000, 20
    models[0].generations = 1
    ceiling.check(models)
    assert [one.unused for one in models] == [0, 450]
    assert memory.active == 900
    ceiling.check(models)
    memory.active, memory.free = 890, 0
    models[0].generations = 2
    ceiling.check(models)
    memory.active, memory.free = 950, 60
    models[0].generations = 3
    ceiling.check(models)
    assert (models[1].unused, memory.active) == (450, 890)


def test_it_looks_when_a_sequence_has_ended(ceiling: SoftCeiling, memory: Memory) -> None:
    model = Model(memory, unused=0)
    for _ in range(5):
        ceiling.check([model])
    assert memory.looks == 0
    model.generations = 1
    for _ in range(5):
        ceiling.check([model])
    assert memory.looks == 1


def test_without_a_budget_there_is_no_ceiling(memory: Memory) -> None:
    ceiling, model = SoftCeiling(Device(torch.device("cpu"))), Model(memory, unused=5)
    ceiling.in_use = lambda: 10**15  # type: ignore[method-assign]
    model.generations = 1
    ceiling.check([model])
    assert model.unused == 5


def test_on_cuda_the_allocator_is_asked_and_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(torch.device("cpu"), BUDGET)
    device.torch = torch.device("cuda", 1)
    reserved = {device.torch: 950}
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: reserved.update({device.torch: 850}))
    model = Model(Memory(), unused=100)
    model.generations = 1
    SoftCeiling(device).check([model])
    assert (reserved[device.torch], model.unused) == (850, 100)


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost(device="cpu", memory=MemoryAmount.parse("1GiB"))
    yield host
    host.close()


def test_what_the_process_has_before_its_first_load_is_not_of_its_models(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(reference=str(path), dtype="fp32", max_batch=4)
    for resident in (700, 5000):  # before the first load, and before the second one
        monkeypatch.setattr(soft_ceiling, "resident_bytes", lambda found=resident: found)
        host.unload(load_reserved(host, spec).name)
    assert host._ceiling.in_use() == 4300


def test_a_worker_above_it_drops_the_prefixes_that_no_sequence_uses(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = load_reserved(host, ModelSpec(reference=str(path), dtype="fp32", max_batch=4)).name
    kept = host._engines[name].book.kept

    def chat(text: str) -> Any:
        sink = WaitingSink()
        request = ask(text, max_tokens=2, ignore_eos=True, seed=1, temperature=0)
        host.submit(CHAT, request.model_copy(update={"model": name}), sink)
        return sink.wait().text

    first = chat("a question that is long enough to be kept as a prefix")
    host._execute(lambda: None)  # the step has ended
    assert len(kept) > 0
    monkeypatch.setattr(soft_ceiling, "resident_bytes", lambda: 10**12)
    chat("another one")
    host._execute(lambda: None)
    assert len(kept) == 0
    monkeypatch.undo()
    assert chat("a question that is long enough to be kept as a prefix") == first
    assert len([one for one in warnings(caplog) if "of --memory" in one]) == 1
