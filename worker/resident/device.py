"""Which device, dtype and cache limit a model gets."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import torch

from jobs.errors import invalid

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
CPU_CACHE_SHARE = 0.25  # of the memory that is free after loading
CUDA_CACHE_SHARE = 0.85
CGROUP = Path("/sys/fs/cgroup")


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA if there, else CPU. A device asked for by name that is missing is an error.

    Raises JobError("invalid_request").
    """
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
        raise invalid(f"device '{name}' is not there; possible: auto, {_possible()}", "device")
    return torch.device("cuda", device.index or 0)


def choose_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's own, if the device can; float16 runs as bfloat16 on CPUs, whose
    float16 arithmetic is slow and overflows. Raises JobError("invalid_request")."""
    if name == "auto":
        if checkpoint is torch.float16 and device.type == "cpu":
            return torch.bfloat16
        if checkpoint is torch.bfloat16 and device.type == "cuda" and not _cuda_bf16(device):
            return torch.float16
        return checkpoint
    if name not in DTYPES:
        raise invalid(f"unknown dtype '{name}'; possible: auto, {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
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
    """Memory that is free on the device now; a container's limit counts."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    return int(min(_free_of_machine(), _free_of_container()))


def _free_of_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_of_container() -> float:
    """What the control group (version 2) leaves, file pages that it can drop counted as free."""
    try:
        limit = (CGROUP / "memory.max").read_text()
        used = int((CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - used + int(counts["inactive_file"]) + int(counts["active_file"]))
    except (OSError, ValueError, KeyError):  # "max": no limit
        return inf


def cache_limit(device: torch.device) -> int:
    """Bytes that caches may take, measured when the weights are in place."""
    return cache_share(free_bytes(device), device)


def cache_share(free: int, device: torch.device) -> int:
    """Bytes for caches out of what is free when the weights are in place."""
    share = CUDA_CACHE_SHARE if device.type == "cuda" else CPU_CACHE_SHARE
    return int(max(free, 0) * share)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch failed to allocate, on either device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _possible() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])


def _cuda_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
