"""Mixtures of experts on GPUs, in Triton: the choice of a token's experts, the order of rows by
expert, biases, and the sum of a token's outputs, by one kernel each, where torch starts several.
Importing this needs the package `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kernels.triton_launch import kernel, kernel_for_any

MOST_PAIRS = 4096  # that `group` orders: each is compared with each; with more, a sort is faster
PAIRS, OTHERS = 32, 256  # of a program, and with which it compares them at a time
COLUMNS, TERMS = 256, 8  # of a sum, at a time
BIASES = 1024  # that a program adds


def select(
    logits: Tensor, bias: Tensor | None, top_k: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """As that of `worker.kernels.mixture`."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=logits.dtype, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    with torch.cuda.device_of(logits):  # Triton starts kernels on the current device
        _select(
            (tokens,),
            *(logits, logits if bias is None else bias, weights, chosen),
            *(logits.stride(0), experts, top_k),
            biased=bias is not None,
            normalise=normalise,
            width=triton.next_power_of_2(experts),
            padded=triton.next_power_of_2(top_k),
            warps=1 if experts <= 256 else 4,
        )
    return weights, chosen


def group(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As that of `worker.kernels.mixture`, of up to MOST_PAIRS pairs."""
    pairs = chosen.numel()
    rows, places = torch.empty_like(chosen).view(-1), torch.empty_like(chosen)
    counts = torch.empty(experts, dtype=torch.int64, device=chosen.device)
    blocks = triton.cdiv(pairs, PAIRS)
    with torch.cuda.device_of(chosen):
        _group(
            (blocks + triton.cdiv(experts, PAIRS),),
            *(chosen, rows, places, counts, pairs, experts, chosen.shape[1], blocks),
            block=PAIRS,
            width=OTHERS,
        )
    return rows, places, counts


def add_biases(y: Tensor, biases: Tensor, counts: Tensor) -> Tensor:
    """As that of `worker.kernels.mixture`, in place."""
    rows, size = y.shape
    with torch.cuda.device_of(y):
        _add_biases(
            (rows, triton.cdiv(size, BIASES)),
            *(y, biases, counts, y.stride(0), size, len(counts)),
            columns=BIASES,
            width=triton.next_power_of_2(len(counts)),
        )
    return y


def combine(outputs: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """As that of `worker.kernels.mixture`."""
    (tokens, top_k), size = places.shape, outputs.shape[1]
    y = torch.empty(tokens, size, dtype=outputs.dtype, device=outputs.device)
    with torch.cuda.device_of(outputs):
        _combine(
            (tokens, triton.cdiv(size, COLUMNS)),
            *(outputs, weights, places, y, outputs.stride(0), size, top_k),
            width=COLUMNS,
            terms=TERMS,
        )
    return y


@kernel
def _select(
    logits,
    bias,
    weights,
    chosen,
    stride,
    experts,
    top_k,
    biased: tl.constexpr,
    normalise: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, width)
    real = e < experts
    scores = tl.load(logits + token * stride + e, mask=real, other=float("-inf")).to(tl.float32)
    if biased:
        scores += tl.load(bias + e, mask=real, other=0.0)
    left = tl.exp(scores - tl.max(scores, 0))
    total = tl.sum(left, 0)
    left = tl.where(real, left, -1.0)
    k = tl.arange(0, padded)
    best = tl.zeros((padded,), tl.float32)
    places = tl.zeros((padded,), tl.int32)
    for at in range(top_k):
        most = tl.max(left, 0)
        # Of NaN none is the greatest.
        place = tl.minimum(tl.min(tl.where(left == most, e, width), 0), experts - 1)
        best = tl.where(k == at, most, best)
        places = tl.where(k == at, place, places)
        left = tl.where(e == place, -1.0, left)
    if normalise:
        total = tl.sum(best, 0)
    to = token * top_k + k
    tl.store(weights + to, (best / total).to(weights.dtype.element_ty), mask=k < top_k)
    tl.store(chosen + to, places.to(tl.int64), mask=k < top_k)


@kernel_for_any("pairs", "blocks")
def _group(
    chosen,
    rows,
    places,
    counts,
    pairs,
    experts,
    top_k,
    blocks,
    block: tl.constexpr,
    width: tl.constexpr,
):
    """A pair's place is the number of those of earlier experts, and of earlier ones of its own."""
    number = tl.program_id(0)
    mine = tl.arange(0, block)
    others = tl.arange(0, width)
    found = tl.zeros((block,), tl.int32)
    if number < blocks:
        p = number * block + mine
        own = tl.load(chosen + p, mask=p < pairs, other=0)[:, None]
        for start in range(0, pairs, width):
            o = start + others
            other = tl.load(chosen + o, mask=o < pairs, other=experts)[None, :]
            earlier = (other < own) | ((other == own) & (o[None, :] < p[:, None]))
            found += tl.sum(earlier.to(tl.int32), 1)
        tl.store(places + p, found.to(tl.int64), mask=p < pairs)
        tl.store(rows + found, (p // top_k).to(tl.int64), mask=p < pairs)
    else:
        e = (number - blocks) * block + mine
        for start in range(0, pairs, width):
            o = start + others
            other = tl.load(chosen + o, mask=o < pairs, other=experts)[None, :]
            found += tl.sum((other == e[:, None]).to(tl.int32), 1)
        tl.store(counts + e, found.to(tl.int64), mask=e < experts)


@kernel
def _add_biases(
    y, biases, counts, stride, size, experts, columns: tl.constexpr, width: tl.constexpr
):
    row = tl.program_id(0)
    e = tl.arange(0, width)
    own = tl.load(counts + e, mask=e < experts, other=0).to(tl.int32)
    expert = tl.sum(((tl.cumsum(own, 0) <= row) & (e < experts)).to(tl.int32), 0)
    d = tl.program_id(1) * columns + tl.arange(0, columns)
    to = y + row.to(tl.int64) * stride + d
    bias = tl.load(biases + expert * size + d, mask=d < size, other=0.0).to(tl.float32)
    found = tl.load(to, mask=d < size, other=0.0).to(tl.float32) + bias
    tl.store(to, found.to(y.dtype.element_ty), mask=d < size)


@kernel
def _combine(
    outputs,
    weights,
    places,
    y,
    stride,
    size,
    top_k,
    width: tl.constexpr,
    terms: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * width + tl.arange(0, width)
    total = tl.zeros((width,), tl.float32)
    for start in range(0, top_k, terms):
        k = start + tl.arange(0, terms)
        at = token * top_k + k
        place = tl.load(places + at, mask=k < top_k, other=0)
        weight = tl.load(weights + at, mask=k < top_k, other=0.0).to(tl.float32)
        inside = (k < top_k)[:, None] & (d < size)[None, :]
        own = tl.load(outputs + place[:, None] * stride + d[None, :], mask=inside, other=0.0)
        total += tl.sum(own.to(tl.float32) * weight[:, None], 0)
    tl.store(y + token * size + d, total.to(y.dtype.element_ty), mask=d < size)
