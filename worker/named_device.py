"""Names of several devices, one for each worker or for each rank of one: `cuda:0,cuda:1`, or ranges
of cores, `cpu:0-3,cpu:4-7`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.errors import invalid

FORM = re.compile(r"cuda:(?:0|[1-9]\d*)|cpu(?::(\d{1,6})(?:-(\d{1,6}))?)?", re.ASCII)
POSSIBLE = "cuda:N, cpu, or cpu:A-B for the cores A to B, separated by commas"


@dataclass(frozen=True, slots=True)
class NamedDevice:
    """The device of a worker or of a rank. `cores`: those that it runs on; None: all that there
    are."""

    name: str  # as it was given
    cores: frozenset[int] | None = None

    @property
    def is_cpu(self) -> bool:
        return self.name.startswith("cpu")

    @property
    def option(self) -> str:
        """The value of --device."""
        return "cpu" if self.is_cpu else self.name


def parse_devices(text: str) -> tuple[NamedDevice, ...]:
    """Raises JobError("invalid_request")."""
    devices: list[NamedDevice] = []
    for name in text.split(","):
        device = _parse(name)
        for other in devices:
            _check_apart(other, device)
        devices.append(device)
    return tuple(devices)


def check_ranks(devices: Sequence[NamedDevice], ranks: int) -> None:
    """Check the devices of the ranks of one model. Raises JobError("invalid_request")."""
    if len(devices) != ranks:
        raise invalid(
            f"{ranks} ranks need {ranks} devices, one for each; {len(devices)} are given", "devices"
        )
    if len({device.is_cpu for device in devices}) > 1:
        raise invalid(
            "the ranks of one model can't be on a CPU and on GPUs: they wait for the slowest in "
            "every layer",
            "devices",
        )
    for device in devices:
        if device.is_cpu and device.cores is None:
            raise invalid(
                f"{device.name!r} is no place for one rank of several: give ranges of cores, such "
                "as cpu:0-3,cpu:4-7",
                "devices",
            )
    if len({len(device.cores) for device in devices if device.cores}) > 1:
        raise invalid(
            "ranks need the same number of cores each: they wait for each other in every layer",
            "devices",
        )


def _parse(name: str) -> NamedDevice:
    found = FORM.fullmatch(name)
    if found is None:
        raise invalid(f"{name!r} is not a device: give {POSSIBLE}", "devices")
    if found[1] is None:
        return NamedDevice(name)
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
    return NamedDevice(name, cores)


def _check_apart(one: NamedDevice, other: NamedDevice) -> None:
    if one.name == other.name:
        raise invalid(f"{one.name!r} is given twice: a device is for one worker or rank", "devices")
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
            "worker or rank",
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
