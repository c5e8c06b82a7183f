"""Draws of tokens on GPUs, in Triton: the logits are read once, and one block of each row again.
Importing this needs the package `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton_launch import kernel

BLOCK = 4096  # logits of a program


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Tensor:
    """The first token of each row [rows, vocab] at which the cumulative sum of the softmax of
    logits / temperature exceeds the row's uniform number: int64 [rows]. temperatures: float32
    [rows], uniforms: float64 [rows]. How a row is drawn does not depend on the others."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums, chosen = torch.empty_like(maxima), torch.empty_like(uniforms, dtype=torch.long)
    sizes = vocab, logits.stride(0)
    with torch.cuda.device_of(logits):  # Triton starts kernels on the current device
        _sum_blocks((rows, blocks), logits, temperatures, maxima, sums, *sizes, width=BLOCK)
        _pick(
            (rows,),
            *(logits, temperatures, uniforms, maxima, sums, chosen, *sizes, blocks),
            width=BLOCK,
            padded=triton.next_power_of_2(blocks),
        )
    return chosen


@triton.jit
def _scaled(logits, temperatures, row, columns, vocab, stride):
    """The logits of some columns over the temperature; beyond the vocabulary -inf."""
    found = tl.load(logits + row * stride + columns, mask=columns < vocab, other=float("-inf"))
    return found.to(tl.float32) / tl.load(temperatures + row)


@kernel
def _sum_blocks(logits, temperatures, maxima, sums, vocab, stride, width: tl.constexpr):
    row, block, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    scaled = _scaled(logits, temperatures, row, block * width + tl.arange(0, width), vocab, stride)
    greatest = tl.max(scaled, 0)
    least = tl.where(greatest == float("-inf"), 0.0, greatest)  # a block of tokens that are banned
    tl.store(maxima + row * blocks + block, greatest)
    tl.store(sums + row * blocks + block, tl.sum(tl.exp(scaled - least), 0))


@kernel
def _pick(
    logits,
    temperatures,
    uniforms,
    maxima,
    sums,
    chosen,
    vocab,
    stride,
    blocks,
    width: tl.constexpr,
    padded: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, padded)
    real = b < blocks
    most = tl.load(maxima + row * blocks + b, mask=real, other=float("-inf"))
    greatest = tl.max(most, 0)
    shares = tl.load(sums + row * blocks + b, mask=real, other=0.0) * tl.exp(most - greatest)
    shares = shares.to(tl.float64)
    target = tl.load(uniforms + row) * tl.sum(shares, 0)
    over = (tl.cumsum(shares, 0) > target) & real
    block = tl.min(tl.where(over, b, tl.max(tl.where(shares > 0, b, 0), 0)), 0)
    before = tl.sum(tl.where(b < block, shares, 0.0), 0)
    columns = block * width + tl.arange(0, width)
    scaled = _scaled(logits, temperatures, row, columns, vocab, stride)
    parts = tl.exp(scaled - greatest).to(tl.float64)
    over = (before + tl.cumsum(parts, 0) > target) & (columns < vocab)
    last = tl.max(tl.where((parts > 0) & (columns < vocab), columns, 0), 0)
    tl.store(chosen + row, tl.min(tl.where(over, columns, last), 0).to(tl.int64))
