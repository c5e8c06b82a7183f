"""Import contracts, and which modules an import loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent


def modules_after(statement: str) -> set[str]:
    """The top-level modules loaded by `statement` in a new process."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [BIN / "lint-imports", "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_jobs_loads_neither_torch_nor_pyarrow() -> None:
    loaded = modules_after("import jobs")
    assert "jobs" in loaded
    assert not loaded & {"torch", "pyarrow", "redis", "worker"}


def test_a_client_loads_neither_torch_nor_pyarrow() -> None:
    loaded = modules_after("from jobs import ChatRequest, Client")
    assert "redis" in loaded
    assert not loaded & {"torch", "pyarrow", "worker"}


def test_help_loads_neither_torch_nor_pyarrow_nor_redis_nor_pydantic() -> None:
    loaded = modules_after(
        "from jobs.cli import main\n"
        "sys.argv = ['chatjobs', '--help']\n"
        "try: main()\n"
        "except SystemExit: pass"
    )
    assert "click" in loaded
    assert not loaded & {"torch", "pyarrow", "redis", "pydantic", "pydantic_core"}


def test_importing_engine_without_torch_names_the_extra_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; from worker import Engine"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: worker.Engine generates and needs torch: pip install -e ")
    assert "[worker]' (on Linux a download of about 3 GB with CUDA, and of 0.2 GB with" in last
