"""Models that stay in host memory: a swap back reads no file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.operations import CHAT
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import WaitingSink, ask
from worker.checkpoint.headers import Checkpoint
from worker.device import Device
from worker.host.engine_host import EngineHost
from worker.loading import load as loading
from worker.loading.find import find
from worker.loading.host_memory import CopiedCheckpoint, HostMemory, Kept, stamps_of
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec

OPENED: list[str] = []
_hooked = False


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        OPENED.append(str(args[0]))


@contextmanager
def opened(folder: Path) -> Iterator[list[str]]:
    """The files of a folder that this process opens meanwhile."""
    global _hooked
    if not _hooked:
        sys.addaudithook(
            lambda event, args: OPENED.append(str(args[0])) if event == "open" else None
        )
        _hooked = True
    OPENED.clear()
    found: list[str] = []
    yield found
    found += [one for one in OPENED if one.startswith(str(folder))]


@pytest.fixture
def make_host() -> Iterator[Callable[[int], EngineHost]]:
    hosts: list[EngineHost] = []

    def make(nbytes: int) -> EngineHost:
        hosts.append(EngineHost(device="cpu", host_memory=MemoryAmount(nbytes=nbytes)))
        return hosts[-1]

    yield make
    for one in hosts:
        one.close()


def specs(folder: Path) -> list[ModelSpec]:
    return [
        ModelSpec(reference=str(make_checkpoint(folder / name)), dtype="fp32", max_batch=2)
        for name in ("one", "two")
    ]


def answer(host: EngineHost, model: str) -> str:
    sink = WaitingSink()
    request = ask("question", max_tokens=8, temperature=0, ignore_eos=True)
    host.submit(CHAT, request.model_copy(update={"model": model}), sink)
    return sink.wait().text


def test_a_swap_back_reads_no_file_and_gives_the_same_tokens(
    tmp_path: Path, make_host: Callable[[int], EngineHost]
) -> None:
    one, two = specs(tmp_path)
    host = make_host(2**30)
    with opened(tmp_path) as read:
        first = host.load(one)
    assert read
    before = [answer(host, "one") for _ in range(8)]  # steps are recorded
    host.unload("one", two)
    assert host.memory().kept == {"one": first.weight_bytes}
    host.load(two)
    host.unload("two", one)
    assert set(host.memory().kept) == {"one", "two"}
    with opened(tmp_path) as read:
        assert host.load(one) == first
    assert read == []
    assert set(host.memory().kept) == {"two"}
    assert [answer(host, "one") for _ in range(8)] == before


def test_a_model_whose_files_have_changed_is_read_again(
    tmp_path: Path, make_host: Callable[[int], EngineHost]
) -> None:
    one, _ = specs(tmp_path)
    host = make_host(2**30)
    first = host.load(one)
    host.unload("one")
    make_checkpoint(tmp_path / "new", seed=5)
    os.replace(tmp_path / "new" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    with opened(tmp_path) as read:
        assert host.load(one).fingerprint != first.fingerprint
    assert read


def test_without_room_a_model_is_read_again(
    tmp_path: Path, make_host: Callable[[int], EngineHost]
) -> None:
    one, two = specs(tmp_path)
    host = make_host(1000)
    host.load(one)
    host.unload("one", two)
    assert host.memory().kept == {}
    with opened(tmp_path) as read:
        host.load(one)
    assert read


def kept(name: str, nbytes: int, *, stays: bool = False) -> Kept[str]:
    return Kept(name, lambda: name, nbytes, {}, stays)


def test_the_least_recently_used_model_goes_first_but_not_the_one_that_comes_next() -> None:
    memory: HostMemory[str] = HostMemory(100)
    one, two, three, four = (ModelSpec(reference=name) for name in ("1", "2", "3", "4"))
    for spec in (one, two):
        assert memory.make_room(50)
        memory.keep(spec, kept(spec.reference, 50))
    assert memory.take(one) is not None
    memory.keep(one, kept("1", 50))
    assert memory.make_room(50)
    assert memory.kept == {"1": 50}
    memory.keep(three, kept("3", 50))
    # The first one leaves host memory as the fourth one comes.
    assert memory.make_room(50, coming_back=one)
    memory.keep(four, kept("4", 50))
    assert memory.kept == {"1": 50, "3": 50, "4": 50}
    assert memory.take(one) is not None and memory.kept == {"3": 50, "4": 50}
    assert not memory.make_room(101)


def test_tensors_are_copied_once_on_the_way_to_a_gpu_and_loaded_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, up to the copy to it."""
    monkeypatch.setattr(loading, "is_accelerator", lambda device: True)
    spec, _ = specs(tmp_path)
    host: loading.HostModels = HostMemory(2**30)
    device = Device(torch.device("cpu"))
    first = loading.load(spec, device, host)
    assert [*host.kept] == ["one"]
    with opened(tmp_path) as read:
        second = loading.load(spec, device, host)
    assert read == [] and [*host.kept] == ["one"]
    assert second.info == first.info and second.model is not first.model
    loading.keep(spec, second, host, None)  # nothing: the copy is there
    assert [*host.kept] == ["one"]
    os.utime(tmp_path / "one" / "config.json", ns=(1, 1))
    assert host.take(spec) is None


def test_a_copied_checkpoint_reads_each_tensor_once(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m")
    reads: list[str] = []
    with find(str(path)).weights() as files:
        read = files.read

        def counted(name: str) -> Any:
            reads.append(name)
            return read(name)

        files.read = counted  # type: ignore[method-assign]
        copied = CopiedCheckpoint(files)
        assert isinstance(copied, Checkpoint)
        names = list(copied.tensors)
        values = {name: copied.read(name) for name in names}
        for name, value in values.items():
            stored = read(name)
            assert isinstance(value, torch.Tensor) and isinstance(stored, torch.Tensor)
            assert torch.equal(value, stored)
    again = {name: copied.read(name) for name in names}
    assert all(again[name] is values[name] for name in names)
    assert reads == names
    assert stamps_of([path / "gone"]) == {}
