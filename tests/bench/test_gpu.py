"""bench.gpu on the CPU, with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from gguf import GGMLQuantizationType as Type

from bench import gpu, gpu_models
from bench.contestants import DECODED, random_prompts
from bench.gpu import SMALLEST_VOCABULARY
from bench.gpu_models import copy_bandwidth, our_engine, our_model, weight_bytes
from bench.gpu_traffic import STOP_SECONDS, Traffic, serve_by_transformers
from bench.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B
from jobs.api.sampling import Sampling
from jobs.errors import JobError
from worker import Engine

CPU = torch.device("cpu")
BATCH = 2
PROMPTS = random_prompts(BATCH, 8, SMALLEST_VOCABULARY)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine, _ = our_engine(gpu._tiny(QWEN3_06B), None, CPU, BATCH)
    yield engine
    engine.close()


@pytest.fixture
def in_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(work):
        work()
        return 1.0

    monkeypatch.setattr(gpu, "seconds", seconds)


def test_a_decode_rate_is_that_of_the_tokens_of_the_steps(
    engine: Engine, in_one_second: None
) -> None:
    assert gpu._our_decode(engine, PROMPTS) == BATCH * DECODED
    assert engine._core.running == 0


def test_only_tokens_that_were_drawn_are_counted(
    engine: Engine, in_one_second: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sequences that end in the measured steps."""
    monkeypatch.setattr(
        gpu, "Sampling", lambda **options: Sampling(**{**options, "max_tokens": 2 + 10})
    )
    assert gpu._our_decode(engine, PROMPTS) == BATCH * 10


def test_a_sequence_that_fails_ends_the_measurement_with_its_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(engine._core.runner, "forward", broken)
    with pytest.raises(JobError, match="no kernel image is available"):
        gpu._our_decode(engine, PROMPTS)


def test_sequences_that_wait_for_others_end_the_measurement(engine: Engine) -> None:
    with pytest.raises(JobError, match="no room for 4 sequences"):
        gpu._our_decode(engine, [*PROMPTS, *PROMPTS])


@pytest.mark.parametrize("kind", [None, Type.Q4_K])
@pytest.mark.parametrize("shape", [QWEN3_06B, QWEN3_30B_A3B])
def test_the_bytes_of_weights_are_known_before_they_are_made(
    shape: dict[str, Any], kind: Type | None
) -> None:
    fields = {**gpu._tiny(shape), "tie_word_embeddings": True}
    _, _, read = our_model(fields, kind, CPU)
    assert weight_bytes(fields, kind) == read.always + read.experts


def test_a_large_model_is_counted_without_its_memory() -> None:
    assert weight_bytes(QWEN3_8B, None) == 2 * 8_190_735_360


@pytest.mark.parametrize(("free", "copied"), [(1000, 250), (1 << 20, 4096)])
def test_a_copy_takes_half_of_the_free_memory_at_most(
    free: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def seconds_of_copy(device, nbytes):
        made.append(nbytes)
        return 2.0

    monkeypatch.setattr(gpu_models, "free_bytes", lambda device: free)
    monkeypatch.setattr(gpu_models, "_seconds_of_copy", seconds_of_copy)
    assert copy_bandwidth(CPU, 4096) == copied
    assert made == [copied]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process stays as it is."""
    for name in ("tune", "freeze_gc_heap", "unfreeze_gc_heap"):
        monkeypatch.setattr(gpu, name, lambda: None)
    return monkeypatch


def bench(out: Path, *options: str) -> Result:
    fixed = ["--device", "cpu", "--tiny", "--shape", "0.6B", "--rounds", "1", "--out", str(out)]
    return CliRunner().invoke(gpu.main, [*fixed, "--batches", "1", *options])


def models_in(out: Path) -> set[str]:
    return {row["model"] for row in json.loads(out.read_text())["rows"]}


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyboardInterrupt()])
def test_what_was_measured_before_an_error_is_shown(
    error: BaseException, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make, out = our_engine, tmp_path / "gpu.json"

    def made(shape, kind, *others):
        if kind is not None:
            raise error
        return make(shape, kind, *others)

    patch.setattr(gpu, "our_engine", made)
    done = bench(out, "--alone", "--no-traffic")
    assert done.exit_code == 1
    assert "decode 1 │" in done.output and "\ndate 2" in done.output
    assert models_in(out) == {"0.6B bf16"}
    assert ("failed: 0.6B Q4_K" in done.output) == isinstance(error, RuntimeError)


def test_a_model_without_room_is_left_out_with_a_line(
    patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields = gpu._tiny(QWEN3_06B)
    free = weight_bytes(fields, Type.Q4_K) / 0.8
    patch.setattr(gpu, "free_bytes", lambda device: free)
    done = bench(tmp_path / "gpu.json", "--alone", "--no-traffic")
    assert done.exit_code == 0, done.output
    assert "0.6B bf16: left out, its weights take " in done.output
    assert models_in(tmp_path / "gpu.json") == {"0.6B Q4_K"}


@pytest.mark.parametrize(("code", "exit_code"), [("internal", 1), ("out_of_memory", 0)])
def test_a_cell_that_fails_is_a_line_and_the_others_are_measured(
    code: Any, exit_code: int, patch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*arguments):
        raise JobError(code, "it fails")

    patch.setattr(gpu, "_our_decode", fails)
    done = bench(tmp_path / "gpu.json", "--alone", "--format", "bf16")
    assert done.exit_code == exit_code
    assert f"0.6B bf16, decode 1: left out: {code}: it fails\n" in done.output
    (first, *turns) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert first["cell"] == gpu.FIRST_TOKEN and len(turns) == len(gpu.TURNS)


def test_an_error_of_transformers_is_a_line(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is made last, when our models are measured."""

    def fails(*arguments):
        raise RuntimeError("no such attention\nSee ...")

    patch.setattr(gpu, "their_model", fails)
    done = bench(tmp_path / "gpu.json")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    for name in ("0.6B", "continuous batching"):
        assert f"transformers, {name}: RuntimeError: no such attention" in lines
    last = next(at for at in range(len(lines)) if lines[at].startswith("transformers"))
    assert '"model": "0.6B Q4_K"' in lines[last - 1]


class Batching:
    """transformers' manager, whose requests never end."""

    def __init__(self) -> None:
        self.stopped: list[dict[str, Any]] = []
        self.warmup = self.start = lambda: None
        self.add_request = lambda prompt, **options: None
        self.get_result = lambda timeout: None
        self.is_running = lambda: True

    def stop(self, **options: Any) -> None:
        self.stopped.append(options)


def test_continuous_batching_that_does_not_end_is_stopped_within_a_limit() -> None:
    batching = Batching()
    model = SimpleNamespace(init_continuous_batching=lambda generation_config: batching)
    assert serve_by_transformers(model, Traffic.random("", tiny=True), 0.01) is None
    assert batching.stopped == [{"block": True, "timeout": STOP_SECONDS, "hard_stop": True}]


@pytest.mark.parametrize("code", [0, 1])
def test_a_thread_that_does_not_end_does_not_keep_the_process(code: int) -> None:
    script = (
        "import threading, time; from bench.gpu_traffic import leave;"
        "threading.Thread(target=time.sleep, args=(600,)).start();"
        f"print('last'); leave({code})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "last\n")
