"""Choices between ways of computing, made by measurement on the machine that computes.

A choice is a number of rows, up to which one way is used and beyond it the other, or 1 or 0 for one
of two ways. Which one is right depends on the CPU, its memory and the number of threads, so that no
constant is. It is measured once, which takes a fraction of a second, and kept in a JSON file beside
the compiled kernels: a machine computes the same numbers after a restart. The bytes that the
activations of a model take are kept likewise.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from worker.kernels import build
from worker.kernels.compilers import CannotBuild

logger = logging.getLogger(__name__)

ROUNDS = 5  # of measuring each way, of which the fastest counts
SIDE = 1024  # outputs and columns of the weights that are measured with
WEIGHT_BYTES = 48 << 20  # of all of them: more than most caches hold, as in a model


def crossing(rows: Sequence[int], first: Sequence[float], second: Sequence[float]) -> int:
    """The number of rows, 0 or one of `rows` (ascending), up to which the first way is used so that
    the sum of the relative times is least. `first` and `second`: seconds of each way for `rows`."""

    def cost(used: int) -> float:
        times = [*first[:used], *second[used:]]
        return sum(time / min(both) for time, *both in zip(times, first, second, strict=True))

    # Of equal costs the last one: the ways for few rows need no packing.
    best = min(range(len(rows), -1, -1), key=cost)
    return rows[best - 1] if best else 0


def seconds(
    ways: Sequence[Sequence[Callable[[Tensor], object]]], rows: Sequence[int]
) -> list[list[float]]:
    """The time of each way for each number of rows: the least of ROUNDS, taken in turns. A way is
    one function per weight, which multiplies x, bf16 [rows, SIDE], with it."""
    found = [[float("inf")] * len(rows) for _ in ways]
    cycles = [cycle(way) for way in ways]
    for i, count in enumerate(rows):
        x = torch.ones(count, SIDE, dtype=torch.bfloat16)
        for _ in range(ROUNDS):
            for functions, times in zip(cycles, found, strict=True):
                multiply = next(functions)
                begin = time.perf_counter()
                multiply(x)
                times[i] = min(times[i], time.perf_counter() - begin)
    return found


def prefers_first(first: Callable[[], object], second: Callable[[], object]) -> bool:
    """True if the first way takes no longer: the least of ROUNDS, taken in turns."""
    found = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for i, compute in enumerate((first, second)):
            begin = time.perf_counter()
            compute()
            found[i] = min(found[i], time.perf_counter() - begin)
    return found[0] <= found[1]


def weights() -> list[Tensor]:
    """bf16 [SIDE, SIDE], WEIGHT_BYTES in all."""
    count = WEIGHT_BYTES // (2 * SIDE * SIDE)
    return list(torch.ones(count, SIDE, SIDE, dtype=torch.bfloat16))


class Choices:
    """The numbers that were measured, by name, for kernels of one level and a number of threads; or
    on a device, which then is the level, without threads."""

    def __init__(self, level: str, threads: int) -> None:
        self._level, self._threads = level, threads
        self._known: dict[str, int] = {}

    def get(self, name: str, measure: Callable[[], int]) -> int:
        """The number that this machine has for `name`. It is measured where no process has done so
        yet; of several that do so at a time, all use what the first one has written."""
        found = self.known(name)
        if found is None:
            # A truth value is kept as the number that it is: `_read` refuses others.
            found = _keep(self._file, name, int(measure()))[name]
            logger.info("measured on this machine: %s: %d", name, found)
            self._known[name] = found
        return found

    def known(self, name: str) -> int | None:
        """The number, if a process on this machine has measured it."""
        if name not in self._known:
            written = _read(self._file)
            if name not in written:
                return None
            self._known[name] = written[name]
        return self._known[name]

    @property
    def _file(self) -> Path | None:
        try:
            return self._path()
        except CannotBuild:  # there is no folder for caches
            return None

    def _path(self) -> Path:
        key = build.fingerprint(
            self._level, build.cpu_model(), str(self._threads), torch.__version__
        )
        return build.cache_folder() / "choices" / f"{key[:16]}.json"


@cache
def of(level: str, threads: int) -> Choices:
    """The choices of this process."""
    return Choices(level, threads)


def _read(path: Path | None) -> dict[str, int]:
    """The numbers that processes have written. A file that can't be read or understood has none."""
    try:
        found = json.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


def _keep(path: Path | None, name: str, found: int) -> dict[str, int]:
    """Write `found`, unless another process has written this name, and return all that is kept."""
    if path is None:
        return {name: found}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # else two processes lose one of their names
            known = {name: found} | _read(path)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, prefix="unfinished-", delete=False
            ) as file:
                json.dump(known, file)
            os.replace(file.name, path)
    except OSError as error:
        logger.info("choices are measured at each start, because they can't be kept: %s", error)
        return {name: found}
    return known
