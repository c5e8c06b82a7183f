"""The memory and the threads of models that share a device."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.api.sampling import Sampling
from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from worker import Engine, device
from worker.backend import CacheUse
from worker.device import CPU_CACHE_SHARE, Device, choose_device
from worker.host.engine_host import EngineHost
from worker.model_spec import ModelSpec


@pytest.mark.parametrize("order", [["large", "small"], ["small", "large"]])
def test_each_model_computes_on_its_own_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: list[str]
) -> None:
    """Not on that of the model that was loaded last."""
    make_checkpoint(tmp_path / "small", num_hidden_layers=1)
    make_checkpoint(tmp_path / "large", num_hidden_layers=8)
    weights = {name: Engine.load(str(tmp_path / name), device="cpu") for name in order}
    sizes = [weights[name].info.weight_bytes for name in ("small", "large")]
    monkeypatch.setattr(device, "SMALL_BYTES", sum(sizes) // 2)
    seen: dict[str, set[int]] = {"small": set(), "large": set()}

    def note(name: str, engine: Engine) -> None:
        model = engine._core.runner.model

        def noted(batch: Any, caches: Any) -> Any:
            seen[name].add(torch.get_num_threads())
            return model(batch, caches)

        monkeypatch.setattr(engine._core.runner, "model", noted)

    for name, engine in weights.items():
        note(name, engine)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for engine in [*weights.values()] * 2:
            engine.generate([[3, 4, 5]], Sampling(temperature=0, max_tokens=3))
            assert torch.get_num_threads() == 3  # for the caller, and for a model that is loaded
    finally:
        torch.set_num_threads(before)
    assert seen == {"small": {1}, "large": {3}}


FREE = 8 * 2**30
MIB = 2**20


class Cache:
    """Implements Holder."""

    def __init__(self, held: int) -> None:
        self.bytes_held = self.bytes_needed = held

    def give_back(self, nbytes: int) -> None:
        raise AssertionError("nothing is to be given back")


def test_without_a_budget_all_caches_share_a_part_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = FREE
    monkeypatch.setattr(device, "free_bytes", lambda _: free)
    cpu = Device(torch.device("cpu"))
    assert cpu.cache_room() == FREE * CPU_CACHE_SHARE
    assert cpu.cache_room(weights=FREE) == 0
    first = cpu.share("first", MIB, None)
    assert first.limit == FREE * CPU_CACHE_SHARE
    first.holder = Cache(2**30)
    free -= 2**30  # which it has taken
    assert cpu.cache_room() == FREE * CPU_CACHE_SHARE - MIB
    second = cpu.share("second", MIB, None)
    assert second.limit == FREE * CPU_CACHE_SHARE - 2**30
    assert first.limit == FREE * CPU_CACHE_SHARE - MIB


def test_a_cache_with_a_limit_of_its_own_has_it_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: FREE)
    cpu = Device(torch.device("cpu"))
    own = cpu.share("own", MIB, 2**30)
    other = cpu.share("other", MIB, None)
    assert own.limit == own.ceiling == 2**30
    assert other.ceiling == (FREE - 2**30) * CPU_CACHE_SHARE
    other.holder = Cache(other.ceiling)
    assert own.limit == 2**30
    assert cpu.share("huge", MIB, 2**50).limit == 2**50


def test_each_model_has_room_for_short_sequences_if_free_memory_shrinks_between_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = FREE
    monkeypatch.setattr(device, "free_bytes", lambda _: free)
    for place in (torch.device("cpu"), torch.device("cuda")):
        several, shares = Device(place), []
        for _ in range(24):
            shares.append(several.share("m", 64 * MIB, None))
            shares[-1].holder = Cache(0)
            free = max(0, free - FREE // 16)  # another process takes it
        assert sum(one.least for one in shares) <= several.caches.total
        assert all(one.limit >= one.least for one in shares)
        free = FREE


def test_the_device_of_a_host_knows_what_each_model_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda _: FREE)
    host = EngineHost(device="cpu")
    try:
        infos = [
            host.load(ModelSpec(reference=str(make_checkpoint(tmp_path / name)), dtype="fp32"))
            for name in ("first", "second")
        ]
        first, second = host.device.held
        assert [first.owner, second.owner] == ["first", "second"]
        assert [first.weights, second.weights] == [info.weight_bytes for info in infos]
        assert [first.threads, second.threads] == [1, 1]
        total = int((FREE + first.cache) * CPU_CACHE_SHARE)
        assert first.cache_limit == total - second.cache_least
        assert second.cache_limit == total - max(first.cache, first.cache_least)
        memory = host.memory()
        assert memory.weights == first.weights + second.weights
        assert memory.cache_limit == total
        assert memory.caches["first"] == CacheUse(first.cache, first.cache_limit, first.cache_least)
    finally:
        host.close()
    assert host.device.held == ()


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("name", ["cuda:7", "cuda:128", "cuda:256", "cuda:257", "mps", "meta"])
def test_a_device_that_is_absent_is_refused_with_those_there_are(
    name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", "13.0" if count else None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = "torch finds 2 GPUs" if count else f"torch {torch.__version__} is built without CUDA"
    why = re.escape(f": {found}") + ".*" if name.startswith("cuda") else ""
    there = "auto, cpu" + ", cuda:0, cuda:1" * (count > 0)
    with pytest.raises(JobError) as caught:
        choose_device(name)
    sentence = f"device '{name}' is not available{why}; possible: {there}"
    assert re.fullmatch(sentence, caught.value.message)
    if count:
        assert choose_device("cuda") == choose_device("auto") == torch.device("cuda", 0)
        assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("cuda", "needs"),
    [("13.0", ", which needs NVIDIA's driver 580 or newer,"), ("99.1", "")],
)
@pytest.mark.parametrize(
    ("visible", "among"),
    [(None, ""), ("", " in CUDA_VISIBLE_DEVICES="), ("3,4", " in CUDA_VISIBLE_DEVICES=3,4")],
)
def test_a_gpu_that_torch_does_not_find_is_refused_with_the_cause(
    cuda: str, needs: str, visible: str | None, among: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a driver that is too old for the CUDA version of torch."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12080).")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "init", init)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(JobError) as caught:
        choose_device("cuda:0")
    assert caught.value.message == (
        f"device 'cuda:0' is not available: torch {torch.__version__} for CUDA {cuda}{needs} finds "
        f"no GPU{among} (The NVIDIA driver on your system is too old (found version 12080)); "
        "possible: auto, cpu"
    )


@pytest.mark.parametrize(
    ("driver", "visible", "warns"),
    [
        (True, None, True),
        (True, "0", True),
        (True, "", False),
        (True, "-1", False),
        (False, None, False),
    ],
)
def test_a_gpu_that_torch_does_not_use_is_a_warning(
    driver: bool,
    visible: str | None,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device, "DRIVER_DEVICE", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(torch.version, "cuda", None)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert choose_device("auto") == torch.device("cpu")
    text = f"computing on the CPU, beside an NVIDIA GPU: torch {torch.__version__} is built without"
    assert (text in caplog.text) == warns


def test_the_warning_of_torch_about_an_old_driver_fails_no_test() -> None:
    """The filters of pytest (pyproject.toml): each other warning does."""
    text = "CUDA initialization: The NVIDIA driver on your system is too old (found version 12080)."
    warnings.warn(text, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning):
        warnings.warn("another", UserWarning, stacklevel=1)
