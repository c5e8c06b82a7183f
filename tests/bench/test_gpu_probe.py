"""What bench.gpu_probe says of machines with and without a GPU. torch and Triton are fakes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from bench import gpu_probe
from worker.kernels import gpu


class Kernels:
    def add_rms_norm(
        self, x: Tensor, delta: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x + delta
        return total, torch.nn.functional.rms_norm(total, (64,), weight, eps)


class Broken:
    def add_rms_norm(self, *arguments: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")


class Wrong:
    def add_rms_norm(self, x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Torch finds a card, and Triton is there. Tensors are on the CPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA Card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 << 30, 8 << 30))
    monkeypatch.setattr(gpu_probe, "DEVICE", torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.7.1"))
    monkeypatch.setattr(gpu, "elementwise", Kernels)
    return monkeypatch


def probe(code: int) -> str:
    """The output of the command, whose exit code is this one."""
    done = CliRunner().invoke(gpu_probe.main, [], catch_exceptions=False)
    assert done.exit_code == code, done.output
    lines = done.output.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == ["commit", "python", "torch", "driver"]
    return "\n".join(lines[4:])


def test_a_card_that_computes_has_its_facts(card: pytest.MonkeyPatch) -> None:
    assert probe(0).splitlines() == [
        "CUDA of torch: 13.0",
        "cuda:0: NVIDIA Card, compute capability 8.6, 3.0 of 8.0 GiB free",
        "triton: 3.7.1",
        "a Triton kernel: compiled, launched, right",
    ]


def test_torch_without_cuda_is_named(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.cuda, "is_available", lambda: False)
    card.setattr(torch.version, "cuda", None)
    assert "is built without CUDA, so install one with it: pip install " in probe(1)


def test_a_card_that_torch_does_not_find_comes_with_its_reason(card: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    card.setattr(torch.cuda, "is_available", lambda: False)
    card.setattr(torch.cuda, "init", init)
    assert probe(1).endswith(" (The NVIDIA driver on your system is too old (found version 11040))")


def test_a_lack_of_triton_is_named(card: pytest.MonkeyPatch) -> None:
    card.setitem(sys.modules, "triton", None)
    assert "\nError: triton can't be imported: " in probe(1)


@pytest.mark.parametrize(
    ("kernels", "sentence"),
    [
        (Broken, "no Triton kernel runs on cpu: Failed to find C compiler."),
        (Wrong, "a Triton kernel computed wrong values on cpu"),
    ],
)
def test_a_kernel_that_does_not_run_or_is_wrong_is_named(
    card: pytest.MonkeyPatch, kernels: type, sentence: str
) -> None:
    card.setattr(gpu, "elementwise", kernels)
    assert probe(1).endswith(f"\nError: {sentence}")


def test_a_machine_without_git_and_driver_still_has_the_other_facts() -> None:
    assert gpu_probe.output_of(("no-such-command",)).startswith("unknown (")
    assert gpu_probe.output_of(("false",)) == "unknown (false ended with exit code 1)"
