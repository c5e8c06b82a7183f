"""Attention of chunks by the kernels equals attention by torch, for both caches and every shape."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.kernels.caches import CPU, examples, filled_cache, random
from worker.kernels import attention, library
from worker.kernels.attention import Way
from worker.kernels.library import Library
from worker.layers.attention import attend
from worker.layers.batch import Batch, Span
from worker.layers.kv_cache import KVCache

Lengths = Sequence[tuple[int, int]]  # the first position and the number of tokens of each sequence


def prefill(
    lengths: Lengths,
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cap: float | None = None,
    sinks: bool = False,
    spoil: tuple[int, int, float] | None = None,
) -> tuple[Tensor, KVCache]:
    """Attention of these tokens, a sequence per slot, single ones and short chunks first.
    `spoil`: the row and the head of a value that is spoilt."""
    columns = max(start + length for start, length in lengths)
    cache = filled_cache(len(lengths), columns, kv_heads, dim, window, dtype)
    spans = [Span(slot, at, [1] * length, 1) for slot, (at, length) in enumerate(lengths)]
    rows = [random(n, heads + 2 * kv_heads, dim, seed=n + at, dtype=dtype) for at, n in lengths]
    qkv = torch.cat(rows)
    if spoil is not None:
        row, head, value = spoil
        qkv[row, heads + head, 0] = value
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    last = random(heads, seed=9) if sinks else None
    batch, ordered = Batch.prepare(spans, CPU)
    assert ordered == spans
    return attend(q, k, v, cache, batch, dim**-0.5, cap, last), cache


@settings(parent=examples, max_examples=150)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 150), st.integers(17, 100)), min_size=1, max_size=3),
    before=st.sampled_from([(), ((40, 1),), ((3, 1), (90, 7))]),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 32, 48, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 7, 32, 100, 128]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    pairs=st.booleans(),
    cap=st.sampled_from([None, 0.5, 50.0]),
    sinks=st.booleans(),
    threads=st.integers(1, 2),
)
def test_attention_of_chunks(
    kernels: Library,
    lengths: list[tuple[int, int]],
    before: Lengths,
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    dtype: torch.dtype,
    pairs: bool,
    cap: float | None,
    sinks: bool,
    threads: int,
) -> None:
    """Also beside single tokens and short chunks."""

    def run() -> tuple[Tensor, KVCache]:
        return prefill(
            [*before, *lengths],
            group * kv_heads,
            kv_heads,
            dim,
            window=window,
            dtype=dtype,
            cap=cap,
            sinks=sinks,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "fastest_way", lambda: Way(pairs, pairs))
        patch.setattr(torch, "get_num_threads", lambda: threads)
        output, cache = run()
        patch.setattr(library, "active", lambda: None)
        expected, same = run()
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.stored().keys, same.stored().keys)
    assert torch.equal(cache.stored().values, same.stored().values)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("window", [None, 6, 40, 100])
def test_cuts_of_a_prompt_change_no_bit(
    kernels: Library, monkeypatch: pytest.MonkeyPatch, window: int | None, pairs: bool
) -> None:
    """A token's result depends on its position and on what it sees."""
    monkeypatch.setattr(attention, "fastest_way", lambda: Way(pairs, pairs))
    heads, kv_heads, dim, total = 3, 1, 48, 171
    qkv = random(total, heads + 2 * kv_heads, dim, seed=7, dtype=torch.bfloat16)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)

    def run(*pieces: int) -> tuple[Tensor, KVCache]:
        cache = filled_cache(2, total, kv_heads, dim, window, torch.bfloat16)
        outputs = []
        for start, end in pairwise(accumulate(pieces, initial=0)):
            batch, _ = Batch.prepare([Span(1, start, [1] * (end - start), 1)], CPU)
            rows = slice(start, end)
            outputs.append(attend(q[rows], k[rows], v[rows], cache, batch, dim**-0.5))
        return torch.cat(outputs), cache

    whole, cache = run(171)
    for pieces in ((17, 18, 23, 31, 82), (64, 64, 43), (150, 21)):
        cut, other = run(*pieces)
        assert torch.equal(cut, whole)
        assert torch.equal(other.stored().keys, cache.stored().keys)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spoiled_sequence_does_not_affect_others(
    kernels: Library, dtype: torch.dtype, value: float
) -> None:
    lengths = [(0, 40), (5, 20), (64, 33)]
    clean, _ = prefill(lengths, 4, 2, 32, dtype=dtype)
    for spoiled_head in (0, 2):  # a key, a value
        spoiled, _ = prefill(lengths, 4, 2, 32, dtype=dtype, spoil=(45, spoiled_head, value))
        assert torch.equal(clean[:40], spoiled[:40])
        assert torch.equal(clean[60:], spoiled[60:])
        assert not torch.isfinite(spoiled[40:60]).all()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("span", [Span(2, 0, [1] * 20, 1), Span(0, 13, [1] * 20, 1)])
def test_a_chunk_outside_the_cache_is_refused(span: Span, window: int | None) -> None:
    cache = filled_cache(2, 32 if window is None else 3, 1, 16, window, torch.float32)
    batch, _ = Batch.prepare([span], CPU)
    rows = random(20, 1, 16, seed=0)
    with pytest.raises(IndexError):
        attend(rows, rows, rows, cache, batch, 1.0)
