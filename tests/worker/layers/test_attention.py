"""Both implementations of chunk attention compute the same; attention with sinks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.worker.slot_storage import SlotStorage
from worker.layers import attention
from worker.layers.batch import Batch, Span
from worker.layers.kv_cache import FullKVCache, KVCache, WindowKVCache


@pytest.mark.parametrize("window", [None, 1, 7, 50, 500])
@pytest.mark.parametrize(("length", "seen"), [(1, 1), (1, 90), (70, 70), (130, 200), (33, 300)])
def test_attention_by_blocks_equals_the_fused_kernel(
    length: int, seen: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(length + seen)
    if window is not None:
        seen = min(seen, length + window - 1)  # what WindowKVCache returns
    q = torch.randn(2, 3, length, 16, generator=random)
    keys, values = (torch.randn(2, seen, 16, generator=random) for _ in range(2))
    expected = attention._fused(q, keys, values, window, 0.3)
    for scores in (attention.BLOCK_SCORES, 1):  # also the smallest blocks
        monkeypatch.setattr(attention, "BLOCK_SCORES", scores)
        output = attention._by_blocks(q, keys, values, window, 0.3)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


HEADS, KV_HEADS, DIM, LENGTH, SCALE = 6, 2, 8, 40, 0.3
CPU = torch.device("cpu")


def directly(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, cap: float | None
) -> Tensor:
    """The definition, one query and head at a time."""
    outputs = torch.empty(LENGTH, HEADS, DIM)
    for at in range(LENGTH):
        first = 0 if window is None else max(0, at - window + 1)
        for head in range(HEADS):
            group = head // (HEADS // KV_HEADS)
            scores = SCALE * k[first : at + 1, group] @ q[at, head]
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            weights = scores.exp() / (scores.exp().sum() + sinks[head].exp())
            outputs[at, head] = weights @ v[first : at + 1, group]
    return outputs.flatten(1)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_takes_weight_and_gives_no_value(window: int | None, cap: float | None) -> None:
    """Two sequences in scattered slots, in chunks and single tokens."""
    random = torch.Generator().manual_seed(3)
    q = torch.randn(2, LENGTH, HEADS, DIM, generator=random)
    k, v = (torch.randn(2, LENGTH, KV_HEADS, DIM, generator=random) for _ in range(2))
    sinks = 3 * torch.randn(HEADS, generator=random)
    cache: KVCache
    if window is None:
        cache = FullKVCache(KV_HEADS, DIM, torch.float32, CPU)
    else:
        cache = WindowKVCache(KV_HEADS, DIM, window, torch.float32, CPU)
    SlotStorage([cache], 4, LENGTH)
    outputs: list[Tensor] = []
    slots = (0, 3)
    for start, end in pairwise([0, 3, 4, 25, 26, 27, LENGTH]):
        spans = [Span(slot, start, [0] * (end - start), LENGTH) for slot in slots]
        batch, _ = Batch.prepare(spans, CPU)
        queries, keys, values = (x[:, start:end].flatten(0, 1) for x in (q, k, v))
        output = attention.attend(queries, keys, values, cache, batch, SCALE, cap, sinks)
        outputs.append(output.view(2, end - start, -1))
    for index, output in enumerate(torch.cat(outputs, dim=1)):
        expected = directly(q[index], k[index], v[index], sinks, window, cap)
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
