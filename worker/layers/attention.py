"""Softmax attention of a flat batch over its caches, with grouped query heads (GQA).

The decode group runs in one kernel, on CPUs together with short chunks, and all other chunks in
another. Without kernels the decode group is one batched product over its slot range, and each chunk
runs alone. On CPUs plain matrix products are faster than torch's fused attention: several times for
single queries, 1.5 to 3.5 times for a block of queries over the keys that it sees. On CUDA chunks
use fused attention, except with score caps or sinks, which it does not have.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.kernels import attention as kernels
from worker.kernels import gpu
from worker.layers.batch import Batch, Chunk
from worker.layers.kv_cache import KVCache
from worker.layers.transfer import is_accelerator

# Queries per block on a CPU: limited so that a block's scores stay in the CPU caches.
MIN_BLOCK, MAX_BLOCK, BLOCK_SCORES = 16, 64, 2**21


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    batch: Batch,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v. Appends k and v to the cache.

    q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], RoPE applied; query head h
    reads kv head h // (heads / kv_heads). `cap` limits scores to (-cap, cap) with tanh, before the
    mask. `sinks` [heads] are one more score per head, which takes part in the softmax as it is and
    has no value. Returns [tokens, heads * head_dim].
    """
    if kernels.serves(q, cache.stored()):
        return _by_kernels(q, k, v, cache.stored(), batch, scale, cap, sinks)
    if gpu.serves(q) and q.shape[2] <= gpu.MAX_HEAD:
        return _on_gpu(q, k, v, cache, batch, scale, cap, sinks)
    outputs = []
    if batch.decode is not None:
        rows = slice(0, batch.decode.size)
        outputs.append(_attend_decode(q[rows], k[rows], v[rows], cache, batch, scale, cap, sinks))
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        outputs.append(_attend_chunk(q[rows], k[rows], v[rows], cache, chunk, scale, cap, sinks))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: kernels.Stored,
    batch: Batch,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    out = torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype)
    single = batch.short or batch.decode
    if single is not None:
        stored.require(slots=single.high, positions=single.longest)
        rows, at = slice(0, single.size), (single.slots, single.positions)
        kernels.attend_decode(q[rows], k[rows], v[rows], stored, *at, scale, cap, sinks, out[rows])
    if batch.long is not None:
        stored.require(slots=batch.long.high, positions=batch.long.longest)
        kernels.attend_chunks(q, k, v, stored, batch.long.chunks, scale, cap, sinks, out)
    return out


def _on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    batch: Batch,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """By the kernels of GPUs; chunks over a window by torch."""
    triton, stored, group = gpu.attention(), cache.stored(), batch.decode
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    if group is not None:
        stored.require(slots=group.high, positions=group.longest)
        rows, at = slice(0, group.size), (group.slots, group.positions)
        triton.attend_decode(q[rows], k[rows], v[rows], stored, *at, scale, cap, sinks, out[rows])
    if batch.chunks and cache.window is None:
        pieces = batch.pieces(triton.queries(q))
        stored.require(slots=pieces.high, positions=pieces.longest)
        triton.attend_chunks(q, k, v, stored, pieces.table, scale, cap, sinks, out)
    elif batch.chunks:
        for chunk in batch.chunks:
            rows = slice(chunk.row, chunk.row + chunk.length)
            out[rows] = _attend_chunk(q[rows], k[rows], v[rows], cache, chunk, scale, cap, sinks)
    return out


def _attend_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    batch: Batch,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    group = batch.decode
    assert group is not None
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys, values = cache.append_decode(k, v, batch)  # [slots, kv_heads, columns, head_dim]
    grouped = group.spread(q).view(-1, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float()  # [slots, kv, r, columns]
    if cap is not None:
        scores, scale = torch.tanh(scores * (scale / cap)), cap
    hidden = batch.decode_mask(keys.shape[2]).isinf()  # what is there may be NaN
    scores = scores.mul_(scale).masked_fill_(hidden, float("-inf"))
    last = None if sinks is None else sinks.view(kv_heads, heads // kv_heads, 1)
    weights = _softmax(scores, last).to(values.dtype)
    values = values.masked_fill(hidden.transpose(-1, -2), 0)
    return group.collect(torch.matmul(weights, values).view(-1, heads * dim))


def _attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache,
    chunk: Chunk,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    length, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys, values = cache.append_chunk(k, v, chunk)  # [kv_heads, n, head_dim]
    repeats = heads // kv_heads
    grouped = q.view(length, kv_heads, repeats, dim).permute(1, 2, 0, 3)  # [kv, r, length, dim]
    if is_accelerator(q.device) and cap is None and sinks is None:
        out = _fused(grouped, keys, values, cache.window, scale)
    else:
        out = _by_blocks(grouped, keys, values, cache.window, scale, cap, sinks)
    return out.permute(2, 0, 1, 3).reshape(length, heads * dim)


def _fused(q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float) -> Tensor:
    """q [kv, r, length, dim], keys and values [kv, seen, dim] → [kv, r, length, dim]."""
    kv_heads, repeats, length, dim = q.shape
    seen = keys.shape[1]
    wide = (kv_heads, repeats, seen, dim)
    keys, values = keys.unsqueeze(1).expand(wide), values.unsqueeze(1).expand(wide)
    causal = seen == length and (window is None or length <= window)
    mask = None if causal else _chunk_mask(length, seen, window, q.device)
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )


def _by_blocks(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The same by plain matrix products, over blocks of queries and the keys that they see."""
    kv_heads, repeats, length, dim = q.shape
    seen = keys.shape[1]
    rows = max(MIN_BLOCK, min(MAX_BLOCK, BLOCK_SCORES // (kv_heads * repeats * seen)))
    last = None if sinks is None else sinks.view(kv_heads, repeats, 1, 1)
    before = seen - length  # position of the first query among the keys
    outputs = []
    for start in range(0, length, rows):
        end = min(start + rows, length)
        low = 0 if window is None else max(0, before + start - window + 1)
        high = before + end
        queries = q[:, :, start:end].reshape(kv_heads, -1, dim)  # [kv, r * (end - start), dim]
        scores = torch.matmul(queries, keys[:, low:high].transpose(-1, -2)).float()
        scores = scores.view(kv_heads, repeats, end - start, high - low)
        hidden = _chunk_mask(end - start, high - low, window, q.device).logical_not()
        scores = scores.mul_(scale)
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        scores = scores.masked_fill_(hidden, float("-inf"))
        weights = _softmax(scores, last).to(values.dtype)
        output = torch.matmul(weights.reshape(kv_heads, -1, high - low), values[:, low:high])
        outputs.append(output.view(kv_heads, repeats, end - start, dim))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _softmax(scores: Tensor, last: Tensor | None) -> Tensor:
    """Softmax over the columns of scores [..., columns]. `last` [..., 1] is one more column, which
    takes part and is dropped."""
    if last is None:
        return torch.softmax(scores, dim=-1)
    last = last.float().expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, last], dim=-1), dim=-1)[..., :-1]


def _chunk_mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """bool [length, seen]: which of the last `seen` positions each of the last `length` sees."""
    query = torch.arange(seen - length, seen, device=device)[:, None]
    key = torch.arange(seen, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
