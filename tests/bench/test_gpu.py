"""bench.gpu on the CPU, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import gpu
from bench.contestants import DECODED, random_prompts
from bench.gpu import SMALLEST_VOCABULARY
from bench.gpu_models import our_engine
from bench.shapes import QWEN3_06B
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
