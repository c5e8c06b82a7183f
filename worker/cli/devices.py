"""The value of `chatjobs work --devices`: one device for each worker, or for each rank of one,
such as `cuda:0,cuda:1`, or ranges of cores, such as `cpu:0-3,cpu:4-7`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import click

from jobs.errors import invalid

FORM = re.compile(r"cuda:(?:0|[1-9]\d*)|cpu(?::(\d{1,6})(?:-(\d{1,6}))?)?", re.ASCII)
POSSIBLE = "cuda:N, cpu, or cpu:A-B for the cores A to B, separated by commas"


@dataclass(frozen=True, slots=True)
class WorkerDevice:
    """The device of one worker. `cores`: those that it runs on; None: all that there are."""

    name: str  # as it was given
    cores: frozenset[int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def option(self) -> str:
        """The value of --device."""
        return "cpu" if self.is_cpu else self.name


def parse_devices(text: str) -> tuple[WorkerDevice, ...]:
    """Raises JobError("invalid_request")."""
    devices: list[WorkerDevice] = []
    for name in text.split(","):
        device = _parse(name)
        for other in devices:
            _check_apart(other, device)
        devices.append(device)
    return tuple(devices)


def cores_of_ranks(devices: Sequence[WorkerDevice], ranks: int) -> tuple[frozenset[int], ...]:
    """The cores of each rank of --tensor-parallel; empty without --devices. Raises UsageError."""
    if not devices:
        return ()
    if len(devices) != ranks:
        raise click.UsageError(
            f"--tensor-parallel {ranks} needs {ranks} devices, one for each rank; --devices has "
            f"{len(devices)}"
        )
    cores = [device.cores for device in devices]
    for device in devices:
        if device.cores is None:
            raise click.UsageError(
                f"--tensor-parallel can't use {device.name!r}: it is for ranges of cores at "
                "present, such as cpu:0-3,cpu:4-7; give each GPU a worker of its own"
            )
    if len({len(one) for one in cores if one}) > 1:
        raise click.UsageError(
            "--tensor-parallel needs the same number of cores for each rank: its ranks wait for "
            "each other in every layer"
        )
    return tuple(one for one in cores if one is not None)


def _parse(name: str) -> WorkerDevice:
    found = FORM.fullmatch(name)
    if found is None:
        raise invalid(f"{name!r} is not a device of --devices: {POSSIBLE}", "devices")
    if found[1] is None:
        return WorkerDevice(name)
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise invalid(f"{name!r} has no cores: give the lower number first", "devices")
    cores = frozenset(range(first, last + 1))
    if not hasattr(os, "sched_getaffinity"):
        raise invalid(f"{name!r}: this system assigns no cores to processes; give cpu", "devices")
    allowed = os.sched_getaffinity(0)
    if missing := cores - allowed:
        raise invalid(
            f"{name!r} needs {_core(missing)}, which this process may not use; it may use "
            f"{_ranges(allowed)}",
            "devices",
        )
    return WorkerDevice(name, cores)


def _check_apart(one: WorkerDevice, other: WorkerDevice) -> None:
    if one.name == other.name:
        raise invalid(f"{one.name!r} is given twice: each device has one worker", "devices")
    if not (one.is_cpu and other.is_cpu):
        return
    if one.cores is None or other.cores is None:
        ranged = other if one.cores is None else one
        raise invalid(
            f"'cpu' takes all cores, also those of {ranged.name!r}: give ranges of cores that do "
            "not overlap",
            "devices",
        )
    if shared := one.cores & other.cores:
        raise invalid(
            f"{one.name!r} and {other.name!r} overlap in {_core(shared)}: give each core to one "
            "worker",
            "devices",
        )


def _core(cores: Iterable[int]) -> str:
    """The cores in words: `core 3`, `cores 2-5`."""
    numbers = sorted(cores)
    return f"core{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}"


def _ranges(cores: Iterable[int]) -> str:
    """Numbers of cores as ranges: `0-3, 6`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ", ".join(_range(run) for run in runs)


def _range(run: Sequence[int]) -> str:
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
