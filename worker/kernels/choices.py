"""Choices between ways of computing, made by measurement on the machine that computes.

A choice is a number of rows, up to which one way is used and beyond it the other, or 1 or 0 for one
of two ways. Which one is right depends on the CPU, its memory and the number of threads, so that no
constant is. It is kept in a JSON file beside the compiled kernels.

A measurement may be wrong: other programs may have had the cores meanwhile. So later loads measure
again, until two clear measurements in a row agree, or MOST_MEASUREMENTS have been made. Then the
choice is final, and the machine computes the same numbers after each restart. Wall-clock time is
measured, since a thread that waits for another one takes CPU time as well.

The bytes that the activations of a model take are kept in such files as well.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from worker.kernels import build
from worker.kernels.compilers import CannotBuild

logger = logging.getLogger(__name__)

ROUNDS = 7  # of measuring each way, in turns
MOST_DISTURBED = 1  # rounds of a clear measurement that may lead to another choice
NEAR = 1.1  # times as long: choices within it are as good as each other
MOST_MEASUREMENTS = 5  # of which the last makes a choice final, whatever they lead to
APART_SECONDS = 600  # between measurements: processes that start together have one
LOCK_SECONDS = 5  # of waiting for another process that measures: it may be frozen
SIDE = 1024  # outputs and columns of the weights that are measured with
WEIGHT_BYTES = 48 << 20  # of all of them: more than most caches hold, as in a model

Times = Sequence[Sequence[float]]  # seconds of each way, for each number of rows
Costs = Mapping[int, float]  # of each number that may be chosen: its time relative to the best


def crossing(rows: Sequence[int], times: Times) -> Costs:
    """The costs of the numbers of rows, 0 or one of `rows` (ascending), up to which the first of
    two ways is used: sums of the relative times."""
    first, second = (_relative(times, way) for way in (0, 1))
    return {most: sum(first[:used]) + sum(second[used:]) for used, most in enumerate((0, *rows))}


def either(times: Times) -> Costs:
    """The costs of always using the first of two ways, 1, or the second, 0."""
    return {1: sum(_relative(times, 0)), 0: sum(_relative(times, 1))}


def _relative(times: Times, way: int) -> list[float]:
    return [both[way] / min(both) for both in zip(*times, strict=True)]


def _best(costs: Costs) -> int:
    # Of equal costs the largest number: the ways for few rows need no packing.
    return min(costs, key=lambda number: (costs[number], -number))


@dataclass(frozen=True)
class Measurement:
    """The costs by the least time of each way, and whether the rounds agree with them."""

    costs: Costs
    is_clear: bool

    @classmethod
    def of(cls, rounds: Sequence[Times], costs_of: Callable[[Times], Costs]) -> Measurement:
        least = [
            [min(times) for times in zip(*way, strict=True)] for way in zip(*rounds, strict=True)
        ]
        costs = costs_of(least)
        agreeing = sum(_is_near(costs_of(times), _best(costs)) for times in rounds)
        return cls(costs, agreeing >= len(rounds) - MOST_DISTURBED)

    @property
    def number(self) -> int:
        return _best(self.costs)

    def is_near(self, number: int) -> bool:
        """True if that number is the best one, or nearly as good."""
        return _is_near(self.costs, number)


def _is_near(costs: Costs, number: int) -> bool:
    return number in costs and costs[number] <= NEAR * min(costs.values())


def seconds(
    ways: Sequence[Sequence[Callable[[Tensor], object]]], rows: Sequence[int]
) -> list[Times]:
    """The times of ROUNDS, in which the ways take turns. A way is one function per weight, which
    multiplies x, bf16 [rows, SIDE], with it."""
    found = [[[0.0] * len(rows) for _ in ways] for _ in range(ROUNDS)]
    cycles = [cycle(way) for way in ways]
    for i, count in enumerate(rows):
        x = torch.ones(count, SIDE, dtype=torch.bfloat16)
        for times in found:
            for way, functions in enumerate(cycles):
                multiply = next(functions)
                begin = time.perf_counter()
                multiply(x)
                times[way][i] = time.perf_counter() - begin
    return [*found]


def compare(first: Callable[[], object], second: Callable[[], object]) -> Measurement:
    """1: the first way is used, 0: the second."""

    def ignoring_rows(compute: Callable[[], object]) -> Callable[[Tensor], object]:
        return lambda x: compute()

    return Measurement.of(seconds([[ignoring_rows(first)], [ignoring_rows(second)]], [1]), either)


def weights() -> list[Tensor]:
    """bf16 [SIDE, SIDE], WEIGHT_BYTES in all."""
    count = WEIGHT_BYTES // (2 * SIDE * SIDE)
    return list(torch.ones(count, SIDE, SIDE, dtype=torch.bfloat16))


@dataclass(frozen=True)
class Kept:
    """The numbers that the measurements of a choice have led to, in their order."""

    clear: list[int]
    unclear: list[int]
    measured_at: int  # the last time: seconds since 1970

    @classmethod
    def read(cls, written: Any) -> Kept:
        """No numbers, unless a process has written `written`."""
        try:
            kept = cls(**written)
            if all(map(_is_number, [*kept.numbers, kept.measured_at])):
                return kept
        except TypeError:
            pass
        return cls([], [], 0)

    @property
    def numbers(self) -> list[int]:
        return [*self.clear, *self.unclear]

    @property
    def number(self) -> int:
        """The choice: of the last clear measurement, else the median of the others."""
        return self.clear[-1] if self.clear else sorted(self.unclear)[len(self.unclear) // 2]

    @property
    def is_final(self) -> bool:
        agree = len(self.clear) > 1 and self.clear[-1] == self.clear[-2]
        return agree or len(self.numbers) >= MOST_MEASUREMENTS

    def is_due(self, now: int) -> bool:
        """True if it is to be measured. Clocks may have been set back."""
        recent = bool(self.numbers) and abs(now - self.measured_at) < APART_SECONDS
        return not self.is_final and not recent

    def after(self, found: Measurement, now: int) -> Kept:
        """With one measurement more. A number stays that is nearly as good as the best one."""
        stays = bool(self.numbers) and found.is_near(self.number)
        number = self.number if stays else found.number
        if found.is_clear:
            return Kept([*self.clear, number], self.unclear, now)
        return Kept(self.clear, [*self.unclear, number], now)


class Choices:
    """The numbers that were measured, by name, for kernels of one level and a number of threads; or
    on a device, which then is the level, without threads."""

    def __init__(self, level: str, threads: int, clock: Callable[[], float] = time.time) -> None:
        self._level, self._threads, self._clock = level, threads, clock
        self._chosen: dict[str, int] = {}  # which this process goes on with

    def get(self, name: str, measure: Callable[[], Measurement]) -> int:
        """The choice of this machine for `name`, measured now where that is due. Of several
        processes one measures at a time, and the others use what it has found. `measure` must not
        ask for another choice."""
        if name not in self._chosen:
            self._chosen[name] = self._choose(name, measure)
        return self._chosen[name]

    def _choose(self, name: str, measure: Callable[[], Measurement]) -> int:
        path = self._file
        kept = Kept.read(_read(path).get(name))
        if not kept.is_due(int(self._clock())):
            return kept.number
        with _alone(path):
            written = _read(path)
            kept, now = Kept.read(written.get(name)), int(self._clock())
            if kept.is_due(now):
                kept = kept.after(measure(), now)
                _write(path, {**written, name: asdict(kept)})
                then = "final" if kept.is_final else "measured again by a later start"
                logger.info("measured on this machine: %s: %d, %s", name, kept.number, then)
        return kept.number

    def known(self, name: str) -> int | None:
        """The number that a process has kept with `keep`."""
        found = _read(self._file).get(name)
        return found if _is_number(found) else None

    def keep(self, name: str, number: int) -> None:
        """Keep a number that is no choice, unless another process has done so."""
        path = self._file
        with _alone(path):
            written = _read(path)
            if not _is_number(written.get(name)):
                _write(path, {**written, name: number})

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


def _is_number(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """One process at a time is inside, unless one stays there for LOCK_SECONDS."""
    with ExitStack() as stack:
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                _lock(stack.enter_context(open(path.with_suffix(".lock"), "w")).fileno())
            except OSError:
                pass  # then nothing can be written either, which `_write` says
        yield


def _lock(file: int) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while not _is_locked_now(file) and time.monotonic() < end:
        time.sleep(0.01)


def _is_locked_now(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path | None) -> dict[str, Any]:
    """What processes have written. A file that can't be read or understood has nothing."""
    try:
        found = json.loads(path.read_bytes()) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is None:
        return
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix="unfinished-", delete=False
        ) as file:
            json.dump(content, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("choices are measured at each start, because they can't be kept: %s", error)
