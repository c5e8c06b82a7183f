"""The facts of this machine's GPUs that a report needs, and whether they can be used:
`bench.gpu_check` begins with it.

    python -m bench.gpu_probe

Each fact is printed as soon as it is known, so that the last line shows what hangs or crashes.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import torch

from bench.harness import first_line
from worker.device import gpus_found
from worker.kernels import gpu

DEVICE = torch.device("cuda")
COMMIT = ("git", "describe", "--always", "--dirty", "--exclude", "*")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@click.command()
def main() -> None:
    """Print the facts. Exits with one sentence if a GPU can't be used."""
    for name, value in facts():
        print(f"{name}: {value}", flush=True)


def facts() -> Iterator[tuple[str, str]]:
    """Names and values. Raises ClickException if something is missing."""
    yield "commit", output_of(COMMIT)
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "driver", output_of(DRIVER)
    if not torch.cuda.is_available():
        raise click.ClickException(f"no GPU can be used: {gpus_found(0)}")
    yield "CUDA of torch", str(torch.version.cuda)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"cuda:{index}",
            f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free",
        )
    try:
        yield "triton", import_module("triton").__version__
    except ImportError as error:
        raise click.ClickException(f"triton can't be imported: {error}") from None
    try:
        right = launch()
    except Exception as error:
        raise click.ClickException(
            f"no Triton kernel runs on {DEVICE}: {first_line(error)}"
        ) from None
    if not right:
        raise click.ClickException(f"a Triton kernel computed wrong values on {DEVICE}")
    yield "a Triton kernel", "compiled, launched, right"


def output_of(command: tuple[str, ...]) -> str:
    """What a command prints, or why it printed nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({first_line(error)})"
    if done.returncode or not done.stdout.strip():
        return f"unknown ({command[0]} ended with exit code {done.returncode})"
    return done.stdout.splitlines()[0]


def launch() -> bool:
    """Start one of our kernels. True if its results are right."""
    ones = torch.ones(2, 64, device=DEVICE)
    total, normed = gpu.elementwise().add_rms_norm(ones, ones, ones[0], 1e-6)
    return bool(
        torch.allclose(total.cpu(), torch.full((2, 64), 2.0))
        and torch.allclose(normed.cpu(), torch.ones(2, 64))
    )


if __name__ == "__main__":
    main()
