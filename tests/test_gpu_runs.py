"""Which runs of the tests see a GPU: those of tests/gpu with CHATJOBS_TEST_GPU=1, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Runs pytest, and prints which GPUs it saw, whether it compiled kernels, and how processes start.
RUN = """
import os, subprocess, pytest
from worker.kernels import build
compiled = []
build.library_paths = lambda *names: compiled.append(names)
code = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "tests/gpu/test_memory.py"])
gpus = os.environ["CUDA_VISIBLE_DEVICES"]
print(int(code), repr(gpus), bool(compiled), subprocess.Popen.__name__)
"""


@pytest.mark.parametrize(
    ("given", "reason", "start"),
    [
        ({}, "for a GPU: make gpu-check, or CHATJOBS_TEST_GPU=1 ", "'' True ForkingPopen"),
        ({"CHATJOBS_TEST_GPU": "1"}, "torch finds no CUDA device", "'-1' False Popen"),
    ],
    ids=["all tests", "tests of GPUs"],
)
def test_only_the_tests_of_gpus_see_a_gpu(given: dict[str, str], reason: str, start: str) -> None:
    """They start neither with compiled kernels nor with forks. `-1` is no GPU."""
    names = ("CHATJOBS_TEST_GPU", "CHATJOBS_TEST_DEVICE")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        env={**kept, "CUDA_VISIBLE_DEVICES": "-1", **given},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    *output, last = done.stdout.splitlines()
    assert last == f"0 {start}", done.stdout + done.stderr
    (skipped,) = (line for line in output if line.startswith("SKIPPED"))
    assert reason in skipped
