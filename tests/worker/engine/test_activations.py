"""The activations of a step are measured once for each shape of a model, and then counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.errors import JobError
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.reserved import load_reserved
from worker import Engine
from worker.engine import activations
from worker.engine.activations import FLOAT_BYTES, forward_peak
from worker.host.engine_host import EngineHost
from worker.kernels.choices import Choices
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec
from worker.residency.budget import share_out

BUDGET = MemoryAmount.parse("1GiB")
MEASURED = 123 * 2**20


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that has measured nothing yet."""
    path = tmp_path / "numbers.json"
    monkeypatch.setattr(Choices, "_path", lambda self: path)
    return path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens that were measured with, each as MEASURED."""
    tokens: list[int] = []

    def peak(model: Any, device: torch.device, count: int, context: int) -> int:
        tokens.append(count)
        return MEASURED

    monkeypatch.setattr(activations, "forward_peak", peak)
    return tokens


@pytest.fixture
def host() -> Iterator[EngineHost]:
    host = EngineHost(device="cpu", memory=BUDGET)
    yield host
    host.close()


def sampling(vocab: int, batch: int) -> int:
    return 3 * batch * vocab * FLOAT_BYTES


def test_a_load_measures_once_what_later_starts_count(
    host: EngineHost, path: Path, measured: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec(reference=str(path), dtype="fp32", max_batch=4)
    first = host.footprint(spec)
    assert not first.activations_measured
    with caplog.at_level(logging.INFO, "worker"):
        name = load_reserved(host, spec).name
    assert "a step of 512 tokens takes 129.0 MB for activations" in caplog.text
    vocab = host._engines[name].vocab_size
    host.unload(name)
    later = EngineHost(device="cpu", memory=BUDGET)
    try:
        counted = later.footprint(spec)
        assert counted.activations == MEASURED + sampling(vocab, 4)
        assert counted.activations_measured
        load_reserved(later, spec)
    finally:
        later.close()
    assert measured == [512]


@pytest.mark.parametrize("change", [{"max_batch": 5}, {"context": 100}, {"dtype": "bf16"}])
def test_another_shape_of_the_model_is_measured_for_itself(
    host: EngineHost, path: Path, measured: list[int], change: dict[str, Any]
) -> None:
    spec: dict[str, Any] = {"reference": str(path), "dtype": "fp32", "max_batch": 4}
    host.unload(load_reserved(host, ModelSpec(**spec)).name)
    other = ModelSpec(**{**spec, **change})
    assert not host.footprint(other).activations_measured
    load_reserved(host, other)
    assert host.footprint(other).activations_measured
    assert measured == [512, 512]


def test_without_a_budget_nothing_is_measured(path: Path, measured: list[int], kept: Path) -> None:
    Engine.load(str(path), device="cpu", dtype="fp32").close()
    assert not measured and not kept.exists()


def test_measured_activations_are_a_part_of_the_share(
    host: EngineHost, path: Path, measured: list[int]
) -> None:
    spec = ModelSpec(reference=str(path), dtype="fp32", max_batch=4)
    estimated = host.footprint(spec)
    load_reserved(host, spec)
    found = host.footprint(spec)
    budget = found.weights + MEASURED + found.least_cache
    share_out([estimated], budget)
    with pytest.raises(JobError, match=r"measured activations 123 MiB.* does not fit into"):
        share_out([found], budget)


def test_a_step_that_has_no_memory_leaves_the_estimate(
    host: EngineHost, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise torch.OutOfMemoryError("requested by the test")

    monkeypatch.setattr(activations, "forward_peak", fails)
    spec = ModelSpec(reference=str(path), dtype="fp32")
    load_reserved(host, spec)
    assert not host.footprint(spec).activations_measured


@pytest.mark.parametrize("context", [512, 200])
def test_the_peak_holds_the_widest_tensors_and_little_more(tmp_path: Path, context: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path / "m", "qwen3", **sizes)
    engine = Engine.load(str(folder), device="cpu", dtype="bf16")
    found = forward_peak(engine._core.runner.model, torch.device("cpu"), 512, context)
    gate_and_up = 512 * 2 * 4096 * 2
    assert gate_and_up < found < 10 * gate_and_up


def test_a_model_with_recurrent_layers_is_measured(tmp_path: Path) -> None:
    engine = Engine.load(str(make_checkpoint(tmp_path / "m", "qwen3_next")), device="cpu")
    assert forward_peak(engine._core.runner.model, torch.device("cpu"), 512, 512) > 0


def test_on_cuda_the_allocator_says_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    found = [0]
    with activations._peak(torch.device("cuda", 0), found):
        pass
    assert found == [250]
