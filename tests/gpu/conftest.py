"""Tests on a CUDA device, against the same model on the CPU in float32. They are skipped without
one and without CHATJOBS_TEST_GPU=1, which `make gpu-check` sets: in other runs no test sees a GPU
(tests/conftest.py). CHATJOBS_TEST_DEVICE names another device: with `cpu` they show that the tests
themselves run.

Tolerances. In float32 both devices add in other orders: logits differ by some 1e-6 of the greatest
one, and greedy tokens are equal. In bf16 and fp16 both round each activation: a device may be at
most `ROUNDING` times as far from float32 as the CPU is in bf16, which has the fewest bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.worker.checkpoints import make_checkpoint
from worker import Engine
from worker.kernels import library

DEVICE = os.environ.get("CHATJOBS_TEST_DEVICE", "cuda")
HERE = Path(__file__).parent

Load = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = _lacking()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            if lacking:
                item.add_marker(pytest.mark.skip(reason=lacking))


def _lacking() -> str | None:
    """Why the tests can't run."""
    if not DEVICE.startswith("cuda"):
        return None
    if os.environ.get("CHATJOBS_TEST_GPU") != "1":
        return "for a GPU: make gpu-check, or CHATJOBS_TEST_GPU=1 .venv/bin/pytest tests/gpu"
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


@pytest.hookimpl(trylast=True)  # the failure is in the summary then
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name the reason of a failure at once: a later test that hangs ends the run without a summary.
    End the run after a test that leaves an error on the device: all later ones would fail."""
    if not report.failed:
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        print(f"\n{report.nodeid}: {crash.message}")
    if not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        pytest.exit(f"{report.nodeid} left CUDA unusable, so no later test was run: {reason}", 1)


@pytest.fixture(autouse=True, scope="session")
def torch_alone() -> Iterator[None]:
    """The CPU computes with torch operations, so that no test needs a C++ compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "active", lambda: None)
        yield


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads an engine on the device, or on the CPU in float32 with `reference`; closes it."""
    engines: list[Engine] = []

    def load(path: Path | str, *, reference: bool = False, **options: Any) -> Engine:
        options = {"max_batch": 4, "dtype": "fp32", **options}
        options["device"] = "cpu" if reference else DEVICE
        engines.append(Engine.load(str(path), **options))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint in bf16, or returns the one that was made with the same fields."""
    made: dict[str, Path] = {}

    def checkpoint(family: str, **fields: Any) -> Path:
        key = f"{family} {fields}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("model") / family
            make_checkpoint(made[key], family, **{"dtype": "bfloat16", **fields})
        return made[key]

    return checkpoint


def greatest(ours: Tensor, theirs: Tensor) -> float:
    """The greatest difference, relative to the greatest value. NaN if there is one."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The length of the difference, relative to that of `theirs`. NaN if there is one."""
    return float((ours - theirs).norm() / theirs.norm())
