"""Options and state that models on several ranks do not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.errors import InvalidRequest, JobError
from tests.worker.ranks.engines import GREEDY, PROMPTS
from worker import Engine
from worker.device import Device
from worker.kernels import library
from worker.kernels.compilers import CannotBuild
from worker.loading.description import describe
from worker.loading.find import find
from worker.loading.preflight import preflight
from worker.model_spec import ModelSpec
from worker.named_device import NamedDevice
from worker.ranks.limits import place_ranks


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel must be 1 to 64, got 0"),
        ({"tensor_parallel": 2, "draft": "demo"}, "can't be used with draft other than 'ngram'"),
        ({"tensor_parallel": 2, "quantize": "q8"}, "can't be used with quantize"),
    ],
)
def test_options_that_ranks_do_not_have_are_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(InvalidRequest, match=fact):
        Engine.load("demo", device="cpu", **options)


def on_gpus(count: int, monkeypatch: pytest.MonkeyPatch, index: int = 0) -> Device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    device = Device(torch.device("cpu"))
    device.torch = torch.device("cuda", index)
    return device


@pytest.mark.parametrize(
    ("gpus", "index", "ranks", "names", "fact"),
    [
        (2, 0, 4, [], r"device 'cuda:2' is not available: .*; possible: auto, cpu, cuda:0, cuda:1"),
        (4, 1, 2, [], "device cuda:1 is one GPU, and tensor_parallel 2 needs 2: name them"),
        (2, 0, 2, ["cuda:0", "cuda:7"], "device 'cuda:7' is not available"),
        (2, 0, 2, [], "needs NCCL, .* and this build of torch has none"),
    ],
)
def test_ranks_on_gpus_that_can_not_be_are_refused(
    gpus: int,
    index: int,
    ranks: int,
    names: list[str],
    fact: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = on_gpus(gpus, monkeypatch, index)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    named = tuple(NamedDevice(name) for name in names)
    spec = ModelSpec(reference="demo", tensor_parallel=ranks, rank_devices=named)
    with pytest.raises(InvalidRequest, match=fact):
        place_ranks(spec, device)


def test_each_rank_has_a_gpu_and_its_part_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    device = on_gpus(4, monkeypatch)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    place_ranks(ModelSpec(reference="demo", tensor_parallel=3), device)
    assert [str(one) for one in device.ranks] == ["cuda:0", "cuda:1", "cuda:2"]
    assert (device.ranks.ranks_each, device.ranks.parts) == (1, 3)
    cpu = Device(torch.device("cpu"))
    place_ranks(ModelSpec(reference="demo", tensor_parallel=3), cpu)
    assert (cpu.ranks.ranks_each, cpu.ranks.parts) == (3, 1)


@pytest.mark.parametrize(
    ("devices", "fact"),
    [
        (["cpu:0"], "2 ranks need 2 devices, one for each; 1 are given"),
        (["cpu", "cuda:0"], "can't be on a CPU and on GPUs"),
        (["cuda:0", "cuda:0"], "'cuda:0' is given twice"),
        (["gpu0", "gpu1"], "'gpu0' is not a device"),
    ],
)
def test_devices_that_ranks_can_not_have_are_refused(devices: list[str], fact: str) -> None:
    with pytest.raises(InvalidRequest, match=fact):
        Engine.load("demo", tensor_parallel=2, devices=devices)
    with pytest.raises(InvalidRequest, match="give one of them"):
        Engine.load("demo", device="cpu", tensor_parallel=2, devices=devices)


def test_ranks_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise CannotBuild("there is no C++ compiler on the PATH")

    monkeypatch.setattr(library, "load", load)
    with pytest.raises(InvalidRequest, match=r"needs the CPU kernels.*no C\+\+ compiler"):
        Engine.load("demo", device="cpu", tensor_parallel=2)


def test_state_is_neither_saved_nor_loaded(both: tuple[Engine, Engine], tmp_path: Path) -> None:
    one, two = both
    path = tmp_path / "prompt.cache"
    with pytest.raises(JobError, match="state of a model on several ranks"):
        two.save_prompt_cache(PROMPTS[0], path)
    one.save_prompt_cache(PROMPTS[0], path)
    with pytest.raises(JobError, match="state of a model on several ranks"):
        two.load_prompt_cache(path)
    assert two.generate([PROMPTS[1]], GREEDY)  # it goes on


def test_each_device_needs_room_for_its_part_of_the_weights() -> None:
    spec = ModelSpec(reference="demo", tensor_parallel=2)
    source = find("demo")
    model, device = describe(source), Device(torch.device("cpu"))
    with source.weights() as checkpoint:
        found = preflight(model, spec, device, checkpoint)
    half = found.weight_bytes // 2 + 1
    apart = replace(found, parts=2, free_bytes=half)
    assert apart.obstacle is None
    assert replace(apart, parts=1).obstacle is not None
    fact = replace(apart, free_bytes=half - 2).obstacle
    assert fact is not None and "on each of 2 devices" in fact
