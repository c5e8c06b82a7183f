"""The commands of the workers of `chatjobs work --devices`: one `chatjobs work --device D` for each
device, with the options that were given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from jobs.errors import invalid
from worker.cli.own_command import own_command
from worker.memory_amount import MemoryAmount
from worker.named_device import NamedDevice

# The supervisor has the value of these for each worker.
OWN = frozenset({"devices", "device", "redis_url", "memory", "host_memory", "http", "log_format"})
HIGHEST_PORT = 2**16 - 1
THREADS = "OMP_NUM_THREADS"  # torch computes on as many


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A worker that is to run. `cores`: those that it is pinned to; None: none."""

    device: str  # as in --devices
    words: tuple[str, ...]
    environment: Mapping[str, str]
    cores: frozenset[int] | None


def worker_commands(
    ctx: click.Context,
    devices: Sequence[NamedDevice],
    *,
    memory: MemoryAmount | None,
    host_memory: MemoryAmount | None = None,
    http: tuple[str, int] | None,
    log_format: str,
) -> list[WorkerCommand]:
    """The command of the worker of each device. `ctx`: of this `chatjobs work`.

    A percentage of `memory` is of the memory of the machine, or of the container, for all workers
    on its CPU together, one of `host_memory` for all workers. The first worker listens at the port
    of `http`, each further one at the next; port 0 is any free one. Raises
    JobError("invalid_request").
    """
    given = list(_given(ctx))
    on_cpu = sum(device.is_cpu for device in devices)
    commands = []
    for number, device in enumerate(devices):
        own = [f"--device={device.option}", f"--log-format={log_format}"]
        if memory is not None:
            own.append(f"--memory={_memory(memory, on_cpu if device.is_cpu else 1)}")
        if host_memory is not None:
            own.append(f"--host-memory={_memory(host_memory, len(devices))}")
        if http is not None:
            own.append(f"--http={_address(http, number)}")
        environment = dict(os.environ)
        if device.cores is not None:
            environment[THREADS] = str(len(device.cores))
        words = (own_command(), "work", *given, *own)
        commands.append(WorkerCommand(device.name, words, environment, device.cores))
    return commands


def _given(ctx: click.Context) -> Iterator[str]:
    """The options of the command line that all workers share; those of the environment are there
    as well."""
    for option in ctx.command.params:
        name = str(option.name)
        if name in OWN or ctx.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        assert isinstance(option, click.Option)
        value: Any = ctx.params[name]
        if option.is_flag:
            yield (option.opts if value else option.secondary_opts)[0]
            continue
        for one in value if option.multiple else (value,):
            yield f"{next(word for word in option.opts if word.startswith('--'))}={one}"


def _memory(amount: MemoryAmount, workers: int) -> str:
    if amount.share is None:
        return str(amount.nbytes)
    percent = f"{100 * amount.share / workers:.6f}".rstrip("0").rstrip(".")
    return f"{percent}%"


def _address(http: tuple[str, int], number: int) -> str:
    host, port = http
    if port != 0:
        port += number
    if port > HIGHEST_PORT:
        raise invalid(
            f"--http: the worker of device {number + 1} would listen at port {port}, and the "
            f"highest is {HIGHEST_PORT}: give a lower one",
            "http",
        )
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
