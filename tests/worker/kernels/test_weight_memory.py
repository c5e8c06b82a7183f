"""Memory of weights is apart, backed by huge pages, and freed with the last tensor in it."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path

import pytest
import torch

from worker.kernels.weight_memory import ALIGNMENT, CHUNK_BYTES, WeightMemory


def virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_tensors_are_apart() -> None:
    memory = WeightMemory()
    shapes = [(3, 5), (1,), (0, 4), (CHUNK_BYTES // 2 + 1,), (CHUNK_BYTES + 7,), (129, 2)]
    types = [torch.bfloat16, torch.float32, torch.uint8]
    tensors = [memory.empty(shape, dtype) for shape in shapes for dtype in types]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    expected = [(shape, dtype) for shape in shapes for dtype in types]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, expected, strict=True)):
        assert tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT == 0
        assert (tensor == number).all()


def test_memory_is_freed_with_the_last_tensor() -> None:
    memory = WeightMemory()
    tensors = [memory.empty((CHUNK_BYTES // 4,), torch.uint8).fill_(1) for _ in range(16)]
    full = resident_bytes()
    kept = tensors[0]
    tensors.clear()
    gc.collect()
    assert full - resident_bytes() > 2 * CHUNK_BYTES
    assert (kept == 1).all()
    assert (memory.empty((10,), torch.uint8).fill_(2) == 2).all()


def test_large_tensors_take_no_more_than_their_size_and_small_ones_share_a_mapping() -> None:
    memory = WeightMemory()
    tensors, size = [memory.empty((), torch.float32)], CHUNK_BYTES // 2 + 1
    before = virtual_bytes()
    for _ in range(20):
        tensors += memory.empty((size,), torch.uint8), memory.empty((1000,), torch.uint8)
    assert virtual_bytes() - before < 20 * (size + mmap.PAGESIZE) + CHUNK_BYTES
    small = [tensor.data_ptr() for tensor in tensors if tensor.numel() < size]
    assert max(small) - min(small) < CHUNK_BYTES


@pytest.mark.parametrize("size", [1 << 60, 1 << 62])
def test_too_large_a_tensor_is_a_memory_error(size: int) -> None:
    with pytest.raises(MemoryError, match=f"no memory for {4 * size} bytes of weights"):
        WeightMemory().empty((size,), torch.float32)


def test_linux_may_use_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no huge pages")
    weight = WeightMemory().empty((1000,), torch.float32)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            here = int(bounds[1], 16) <= weight.data_ptr() < int(bounds[2], 16)
        elif line.startswith("VmFlags:") and here:
            assert " hg" in line
            return
    raise AssertionError("the mapping was not found")
