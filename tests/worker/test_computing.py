"""What a model computes starts on its own GPU, and leaves the caller's threads as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from worker import Engine
from worker.device import computing


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs that were made the current one."""
    found: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        found.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    return found


def test_steps_start_their_kernels_on_the_gpu_of_the_model(entered: list[torch.device]) -> None:
    """Triton starts a kernel on the current GPU, wherever its tensors are."""
    engine = Engine.load("demo", device="cpu")
    assert not engine._core.step() and not entered
    second = engine._core.device = torch.device("cuda", 1)
    assert not engine._core.step()
    with engine._core.changing():
        pass
    engine._core.device = torch.device("cpu")
    engine.close()
    assert entered == [second, second]


def test_threads_are_given_back(entered: list[torch.device]) -> None:
    before = torch.get_num_threads()
    with computing(torch.device("cpu"), before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    assert not entered
