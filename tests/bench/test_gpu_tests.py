"""How tests/gpu ends after an error that CUDA keeps. Failing tests and CUDA are fakes here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import torch

def test_first(): ...

def test_fails():
    assert {fails} == 0

def test_later(): ...

torch.cuda.is_initialized = lambda: True

def synchronize():
    {effect}

torch.cuda.synchronize = synchronize
"""
CONFTEST = "from tests.gpu.conftest import pytest_runtest_logreport"


def failing(folder: Path, effect: str, fails: int = 1) -> str:
    """The output of tests of which the second one fails."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS.format(effect=effect, fails=fails))
    options = ["-p", "no:cacheprovider", "-q", "-ra", "--tb=short", "--import-mode=importlib"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (1 if fails else 0), done.stdout + done.stderr
    return done.stdout


BROKEN = "raise RuntimeError('CUDA error: an illegal memory access\\nCompile with ...')"


def test_a_failure_that_leaves_an_error_ends_the_run_with_the_name_of_its_test(
    tmp_path: Path,
) -> None:
    output = failing(tmp_path, BROKEN)
    assert "1 failed, 1 passed" in output
    assert "FAILED test_some.py::test_fails" in output
    assert "\ntest_some.py::test_fails: assert 1 == 0\n" in output.partition("= FAILURES")[0]
    assert (
        "test_some.py::test_fails left CUDA unusable, so no later test was run: "
        "CUDA error: an illegal memory access" in output
    )


@pytest.mark.parametrize(("effect", "fails"), [("pass", 1), (BROKEN, 0)])
def test_other_tests_are_followed_by_the_rest(effect: str, fails: int, tmp_path: Path) -> None:
    assert f"{3 - fails} passed" in failing(tmp_path, effect, fails)
