"""The device that models run on: its selection and its limits, the bytes that each model holds on
it, and the threads that the steps of each model compute on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Protocol

import torch

from jobs.errors import JobError, invalid
from worker.backend import Reservation
from worker.cache_memory import CacheMemory, CacheShare
from worker.checkpoint.dtypes import FROM_OPTION
from worker.layers.transfer import is_accelerator
from worker.memory_amount import MemoryAmount
from worker.model_spec import ModelSpec

logger = logging.getLogger(__name__)

CPU_CACHE_SHARE = 0.25  # of the memory that is free after loading
CUDA_CACHE_SHARE = 0.85
SMALL_BYTES = 64 * 2**20  # models with smaller weights compute on one thread
CGROUP = Path("/sys/fs/cgroup")
# NVIDIA's oldest driver for each CUDA version: the compatibility of minor versions in CUDA's
# release notes.
DRIVERS = {"12": 525, "13": 580}
HIDDEN = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that name no GPU
DRIVER_DEVICE = Path("/dev/nvidiactl")  # of NVIDIA's driver on Linux


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch on a device."""

    max_batch: int  # sequences, by default
    step_tokens: int  # tokens of one step
    stride: int  # tokens between the cuts of a prefill whose bits must not depend on reuse
    overlaps: bool  # it computes a step while the host commits the one before


CPU_LIMITS = BatchLimits(max_batch=16, step_tokens=512, stride=64, overlaps=False)
ACCELERATOR_LIMITS = BatchLimits(max_batch=128, step_tokens=8192, stride=512, overlaps=True)


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that one model holds on a device, and the threads that it computes on."""

    owner: str  # the name of the model
    weights: int  # with those of its draft
    cache: int  # KV cache and kept state, allocated now
    cache_limit: int  # that these may take now
    cache_least: int  # that are kept for these
    threads: int | None  # of the CPU, in its steps; see `threads_of`


class Owner(Protocol):
    """A model that is loaded on a device."""

    @property
    def held(self) -> Held:
        """Read by any thread."""


class RankDevices(tuple[torch.device, ...]):
    """The device of each rank of a model, the first one's first. On a CPU, all have the same."""

    @property
    def first(self) -> torch.device:
        return self[0]

    @property
    def parts(self) -> int:
        """Devices that the weights are divided over."""
        return len(set(self))

    @property
    def ranks_each(self) -> int:
        """Ranks with caches on one device."""
        return len(self) // self.parts


class Device:
    """One device, with all that is loaded on it. The thread that loads models adds and removes
    their owners; any thread may read. `memory`: the budget of its models.

    Raises JobError("invalid_request") for more than there is."""

    def __init__(self, torch_device: torch.device, memory: MemoryAmount | None = None) -> None:
        self.torch = torch_device
        self.ranks = RankDevices([torch_device])  # of the model
        # Bytes that all models together may take; None: what is free.
        self.budget: int | None = None
        if memory is not None:
            self.budget = memory.of(total_bytes(torch_device), str(torch_device))
        self.caches = CacheMemory(self.budget or 0)
        self._owners: tuple[Owner, ...] = ()  # replaced, never changed

    @property
    def held(self) -> tuple[Held, ...]:
        """The holdings of each model, in the order of loading."""
        return tuple(owner.held for owner in self._owners)

    def add(self, owner: Owner) -> None:
        self._owners = (*self._owners, owner)

    def remove(self, owner: Owner) -> None:
        self._owners = tuple(one for one in self._owners if one is not owner)

    def spread(self, spec: ModelSpec) -> None:
        """Give each rank of a model its device: those that `spec` names, all this CPU, or the first
        GPUs. Raises JobError("invalid_request") if one is not available."""
        ranks = spec.tensor_parallel
        if ranks == 1 or self.torch.type == "cpu":
            self.ranks = RankDevices([self.torch] * ranks)
            return
        names = [one.name for one in spec.rank_devices]
        if not names and self.torch.index:
            raise invalid(
                f"device {self.torch} is one GPU, and tensor_parallel {ranks} needs {ranks}: name "
                "them in devices, or leave device out",
                "device",
            )
        self.ranks = RankDevices(
            choose_device(name) for name in names or [f"cuda:{rank}" for rank in range(ranks)]
        )

    def free_bytes(self) -> int:
        """Free memory now, within the budget."""
        free = free_bytes(self.torch)
        if self.budget is None:
            return free
        return max(0, min(free, self.budget - sum(one.weights + one.cache for one in self.held)))

    def keep_room(self, name: str, reservation: Reservation, since: float) -> bool:
        """Keep memory of the budget for a model that is loaded next; see `CacheMemory.enter`."""
        share = next((one for one in self.caches.wants if one.name == name), None)
        if share is None or share.holder is not None:
            share = CacheShare(
                self.caches,
                name,
                reservation.fixed,
                reservation.least_cache,
                reservation.cache_limit,
                reservation.cache,
            )
        return self.caches.enter(share, since)

    def share(
        self, name: str, least: int, limit: int | None, elsewhere: int | None = None
    ) -> CacheShare:
        """The share of the cache of a model whose weights are loaded: under a budget the one that
        was reserved for it. Without one, all caches share a part of what is free now. `limit`: of
        this cache, which then has it to itself. `elsewhere`: bytes that are free on the device
        with the least of the model's other ones."""
        for one in self.caches.shares:
            if one.holder is None and one.name == name:
                return one
        if self.budget is not None:
            raise JobError("internal", f"no memory of the budget was reserved for {name}")
        share = CacheShare(self.caches, name, 0, least if limit is None else limit, limit)
        self.caches.budget = self._free_for_caches(share, elsewhere=elsewhere)
        self.caches.shares = (*self.caches.shares, share)
        return share

    def cache_room(self, weights: int = 0) -> int:
        """Bytes that the cache of one more model may have at most beside its weights, if `weights`
        bytes of them are not loaded yet."""
        caches = self.caches
        if self.budget is None:
            left = self._free_for_caches(None, weights)
        else:
            loading = next((one for one in caches.shares if one.holder is None), None)
            if loading is not None:
                return loading.ceiling
            left = caches.total - weights
        return max(0, left - sum(one.least for one in caches.shares))

    def _free_for_caches(
        self, new: CacheShare | None, weights: int = 0, elsewhere: int | None = None
    ) -> int:
        """Without a budget: the bytes of all caches. Those with a limit of their own have it to
        themselves; the others have a part of the free memory, and at least their least."""
        shares = (*self.caches.shares, *([] if new is None else [new]))
        own = sum(one.most for one in shares if one.most is not None)
        pooled = [one for one in shares if one.most is None]
        promised = sum(
            max(0, one.most - one.held) for one in self.caches.shares if one.most is not None
        )
        free = self.free_bytes() if elsewhere is None else min(self.free_bytes(), elsewhere)
        free += sum(one.held for one in pooled) - weights - promised
        return own + max(cache_share(free, self.torch), sum(one.least for one in pooled))


def choose_device(name: str) -> torch.device:
    """`auto`: CUDA if available, else CPU, with a warning if there is a GPU that torch can't use.
    Raises JobError("invalid_request") for a device that is not available."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        if DRIVER_DEVICE.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDDEN:
            logger.warning("computing on the CPU, beside an NVIDIA GPU: %s", gpus_found(0))
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise invalid(f"unknown device '{name}'; possible: auto, {_possible()}", "device") from None
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # torch takes an index modulo 256: cuda:256 is cuda:0.
    if device.type != "cuda" or str(device) != name or (device.index or 0) >= count:
        why = f": {gpus_found(count)}" if device.type == "cuda" else ""
        raise invalid(
            f"device '{name}' is not available{why}; possible: auto, {_possible()}", "device"
        )
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


def total_bytes(device: torch.device) -> int:
    """The memory of the device, within the memory limit of the container."""
    if device.type == "cuda":
        total: int = torch.cuda.mem_get_info(device)[1]
        return total
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(total, int((CGROUP / "memory.max").read_text()))
    except (OSError, ValueError):  # "max": no limit
        return total


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


def cache_share(free: int, device: torch.device) -> int:
    """The part of `free` bytes that caches may take; the rest is for activations."""
    share = CUDA_CACHE_SHARE if device.type == "cuda" else CPU_CACHE_SHARE
    return int(max(free, 0) * share)


def threads_of(weight_bytes: int) -> int | None:
    """The threads of the CPU that a model with these weights computes on; None: all of torch's. In
    the short steps of a small model, threads spend more time waiting for each other than computing
    as soon as cores are contended."""
    return 1 if weight_bytes < SMALL_BYTES else None


@contextmanager
def computing(device: torch.device, threads: int | None = None) -> Iterator[None]:
    """A context for what a model computes: kernels start on its GPU, or use as many threads of the
    CPU as `threads_of` says. Other models and the caller's own torch keep theirs."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
        return
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_out_of_memory(error: BaseException) -> bool:
    """True if torch failed to allocate memory, on CPU or CUDA."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _possible() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])


def gpus_found(count: int) -> str:
    """A clause: how many GPUs torch finds, and if there are none, why and what to do."""
    version = torch.version.cuda
    if version is None:
        return (
            f"torch {torch.__version__} is built without CUDA, so install one with it: pip install "
            "--force-reinstall torch --index-url https://pypi.org/simple"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    among = "" if visible is None else f" in CUDA_VISIBLE_DEVICES={visible}"
    if count:
        return f"torch finds {count} GPU{'s' * (count > 1)}{among}"
    driver = DRIVERS.get(version.partition(".")[0])
    needs = "" if driver is None else f", which needs NVIDIA's driver {driver} or newer,"
    try:
        torch.cuda.init()
        reason = ""
    except Exception as error:  # of several types
        reason = f" ({' '.join(str(error).split()).rstrip('.')})"
    return f"torch {torch.__version__} for CUDA {version}{needs} finds no GPU{among}{reason}"


def _cuda_bf16(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)
