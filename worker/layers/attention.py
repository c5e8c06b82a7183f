"""Softmax attention of a flat batch over its caches, with grouped query heads (GQA).

The decode group runs as one batched product over its slot range; each chunk runs alone. Plain
products beat fused attention for single queries on CPUs by several times.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from worker.layers.batch import Batch, Chunk
from worker.layers.cache import KVCache


def attend(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, batch: Batch, scale: float) -> Tensor:
    """softmax(scale · q kᵀ + mask) v, storing k and v on the way.

    q [tokens, heads, head_dim], k and v [tokens, kv_heads, head_dim], RoPE applied; query head h
    reads kv head h // (heads / kv_heads). Returns [tokens, heads * head_dim].
    """
    outputs = []
    done = 0
    if batch.decode is not None:
        done = batch.decode.size
        outputs.append(_attend_decode(q[:done], k[:done], v[:done], cache, batch, scale))
    for chunk in batch.chunks:
        rows = slice(chunk.row, chunk.row + chunk.length)
        outputs.append(_attend_chunk(q[rows], k[rows], v[rows], cache, chunk, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_decode(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, batch: Batch, scale: float
) -> Tensor:
    group = batch.decode
    assert group is not None
    _, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys, values = cache.append_decode(k, v, batch)  # [slots, kv_heads, columns, head_dim]
    grouped = group.spread(q).view(-1, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).float()  # [slots, kv, r, columns]
    scores = torch.add(batch.decode_mask(keys.shape[2]), scores, alpha=scale)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return group.collect(torch.matmul(weights, values).view(-1, heads * dim))


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, cache: KVCache, chunk: Chunk, scale: float
) -> Tensor:
    length, heads, dim = q.shape
    kv_heads = k.shape[1]
    keys, values = cache.append_chunk(k, v, chunk)  # [kv_heads, n, head_dim]
    repeats = heads // kv_heads
    seen = keys.shape[1]
    grouped = q.view(length, kv_heads, repeats, dim).permute(1, 2, 0, 3)  # [kv, r, length, dim]
    wide = (kv_heads, repeats, seen, dim)
    keys, values = keys.unsqueeze(1).expand(wide), values.unsqueeze(1).expand(wide)
    causal = seen == length and (cache.window is None or length <= cache.window)
    mask = None if causal else _chunk_mask(length, seen, cache.window, q.device)
    out = F.scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask, is_causal=causal, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(length, heads * dim)


def _chunk_mask(length: int, seen: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the last `seen` positions the last `length` ones see: bool [length, seen]."""
    query = torch.arange(seen - length, seen, device=device)[:, None]
    key = torch.arange(seen, device=device)[None, :]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
