"""The memory that steps have in use, and the sequences that have it as their peak."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from jobs.api.sampling import Sampling
from tests.worker.checkpoints import make_checkpoint
from tests.worker.engine.chat_requests import ask
from tests.worker.scoring.scores import score_result
from worker import Engine
from worker.engine.memory_meter import CudaMeter, ProcessMeter, memory_meter
from worker.engine.sequence import Sequence
from worker.processes.resident import resident_bytes
from worker.sampling.params import SamplingParams

MB = 10**6


class ScriptedMeter:
    """Gives each step the next figure."""

    def __init__(self, figures: Iterable[int]) -> None:
        self._figures = iter(figures)
        self.steps = 0

    def begin(self) -> None:
        self.steps += 1

    def peak(self) -> int:
        return next(self._figures)

    def close(self) -> None:
        pass


@pytest.fixture
def own(path: Path) -> Engine:
    return Engine.load(str(path), device="cpu", dtype="fp32", max_batch=4)


def sequence(engine: Engine, tokens: int) -> Sequence:
    params: SamplingParams = engine._core.sampling_params(
        Sampling(max_tokens=tokens, ignore_eos=True), [5, 6, 7]
    )
    return Sequence([5, 6, 7], params)


def test_a_sequence_has_the_highest_value_of_the_steps_that_it_took_part_in(own: Engine) -> None:
    core = own._core
    core._meter = ScriptedMeter([30, 10, 90, 20])
    short, long = sequence(own, 2), sequence(own, 4)
    core.add([short, long])
    while core.step():
        pass
    assert (short.peak_bytes, long.peak_bytes) == (30, 90)


def test_answers_and_scores_have_the_peak_in_whole_megabytes(own: Engine) -> None:
    own._core._meter = ScriptedMeter([30 * MB, 20 * MB + 1, *[MB] * 100])
    usage = own.chat(ask(max_tokens=2, ignore_eos=True, n=2, seed=1)).usage
    assert usage is not None and usage.peak_memory_mb == 30
    own._core._meter = ScriptedMeter([20 * MB + 1] * 100)
    item = {"type": "loglikelihood", "prompt": "one", "continuations": [" two"]}
    result = score_result(own, item)
    assert result.usage is not None and result.usage.peak_memory_mb == 21


def test_an_answer_on_the_cpu_has_the_resident_memory_of_the_process(own: Engine) -> None:
    usage = own.chat(ask(max_tokens=1)).usage
    assert usage is not None and usage.peak_memory_mb is not None
    assert abs(usage.peak_memory_mb * MB - resident_bytes()) < 200 * MB


def test_the_meter_of_a_process_sees_what_a_step_has_touched() -> None:
    meter = ProcessMeter()
    meter.begin()
    before = meter.peak()
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    assert meter.peak() - before > 0.9 * len(held)
    meter.close()
    assert meter.peak() == 0


def test_a_closed_engine_leaves_no_file_open(path: Path, tmp_path: Path) -> None:
    def opened() -> int:
        paths = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return sum(os.path.realpath(one).endswith("statm") for one in paths)

    before = opened()
    engine = Engine.load(str(make_checkpoint(tmp_path / "m", num_hidden_layers=1)), device="cpu")
    assert opened() == before + 1
    engine.close()
    assert opened() == before


def test_the_peak_on_cuda_is_that_of_the_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    device = torch.device("cuda", 1)

    def reset(of: torch.device) -> None:
        assert of == device
        calls.append("reset")

    def stats(of: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        assert of == device
        calls.append("read")
        return {"allocated_bytes": {"all": {"current": 5, "peak": 7}}}

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    meter = memory_meter(device)
    assert isinstance(meter, CudaMeter)
    meter.begin()
    assert meter.peak() == 7
    assert calls == ["reset", "read"]
