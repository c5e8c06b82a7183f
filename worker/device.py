"""Selects the device and the dtype of a model, the memory for its caches and the threads of its
steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import torch

from jobs.errors import invalid
from worker.checkpoint.dtypes import FROM_OPTION
from worker.layers.transfer import is_accelerator

CPU_CACHE_SHARE = 0.25  # of the memory that is free after loading
CUDA_CACHE_SHARE = 0.85
SMALL_BYTES = 64 * 2**20  # models with smaller weights compute on one thread
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch on a device."""

    max_batch: int  # sequences, by default
    step_tokens: int  # tokens of one step
    stride: int  # tokens between the cuts of a prefill whose bits must not depend on reuse


CPU_LIMITS = BatchLimits(max_batch=16, step_tokens=512, stride=64)
ACCELERATOR_LIMITS = BatchLimits(max_batch=128, step_tokens=8192, stride=512)


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA if available, else CPU. Raises JobError("invalid_request") for a device that is
    not available."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise invalid(f"unknown device '{name}'; possible: auto, {_possible()}", "device") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type != "cuda" or (device.index or 0) >= count:
        raise invalid(f"device '{name}' is not available; possible: auto, {_possible()}", "device")
    return torch.device("cuda", device.index or 0)


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's dtype if the device supports it. On CPUs float16 becomes bfloat16,
    because float16 arithmetic is slow there and overflows. Raises JobError("invalid_request")."""
    if name == "auto":
        if checkpoint is torch.float16 and device.type == "cpu":
            return torch.bfloat16
        if checkpoint is torch.bfloat16 and device.type == "cuda" and not _cuda_bf16(device):
            return torch.float16
        return checkpoint
    known = name.removeprefix("torch.")  # str(torch.bfloat16)
    if known not in FROM_OPTION:
        raise invalid(f"unknown dtype '{name}'; possible: auto, {', '.join(FROM_OPTION)}", "dtype")
    return FROM_OPTION[known]


def limits(device: torch.device) -> BatchLimits:
    """The limits of a batch on this device."""
    return ACCELERATOR_LIMITS if is_accelerator(device) else CPU_LIMITS


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "CPU"


def free_bytes(device: torch.device) -> int:
    """Free memory of the device, within the memory limit of the container."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(min(_free_on_host(), _free_in_container()))


def _free_on_host() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_container() -> float:
    """Free memory in the control group (version 2); its page cache counts as free."""
    try:
        limit = (CGROUP / "memory.max").read_text()
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(counts["inactive_file"]) + int(counts["active_file"]))
    except (OSError, ValueError, KeyError):  # "max": no limit
        return inf


def cache_limit(device: torch.device) -> int:
    """Bytes that caches may take. Call it after the weights are loaded."""
    return cache_share(free_bytes(device), device)


def cache_share(free: int, device: torch.device) -> int:
    """Bytes that caches may take when `free` bytes are left after loading."""
    share = CUDA_CACHE_SHARE if device.type == "cuda" else CPU_CACHE_SHARE
    return int(max(free, 0) * share)


@contextmanager
def computing(weight_bytes: int) -> Iterator[None]:
    """A context for what a model computes on the CPU: a small one uses one thread, others all of
    torch's. In the short steps of a small model, threads spend more time waiting for each other
    than computing as soon as cores are contended. Other models and the caller's own torch keep
    their threads."""
    threads = torch.get_num_threads()
    if weight_bytes >= SMALL_BYTES or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch failed to allocate memory, on CPU or CUDA."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _possible() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])


def _cuda_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
