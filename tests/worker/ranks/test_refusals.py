"""Options and state that models on several ranks do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.errors import InvalidRequest, JobError
from tests.worker.ranks.engines import GREEDY, PROMPTS
from worker import Engine
from worker.device import Device
from worker.engine.engine import EngineCore
from worker.kernels import library
from worker.kernels.compilers import CannotBuild
from worker.model_spec import ModelSpec


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


def test_ranks_on_gpus_are_refused() -> None:
    device = Device(torch.device("cpu"))
    device.torch = torch.device("cuda", 0)
    with pytest.raises(InvalidRequest, match="tensor_parallel 2 is for device cpu at present"):
        EngineCore.load(ModelSpec(reference="demo", tensor_parallel=2), device=device)


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
