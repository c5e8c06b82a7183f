"""Attention of single tokens by the kernels equals attention by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.kernels.caches import CPU, examples, filled_cache, random
from worker.kernels import attention, library
from worker.kernels.attention import Way
from worker.kernels.library import Library
from worker.layers.attention import attend
from worker.layers.batch import Batch, Span
from worker.layers.kv_cache import KVCache


def decode(
    positions: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    *,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    cap: float | None = None,
    sinks: bool = False,
    spoil: float | None = None,
    cache: KVCache | None = None,
) -> tuple[Tensor, KVCache]:
    """Attention of one new token per slot, at these positions."""
    if cache is None:
        cache = filled_cache(len(positions), max(positions) + 1, kv_heads, dim, window, dtype)
    spans = [Span(slot, at, [1], 1) for slot, at in enumerate(positions)]
    batch, _ = Batch.prepare(spans, CPU)
    qkv = random(len(positions), heads + 2 * kv_heads, dim, seed=7, dtype=dtype)
    if spoil is not None:
        qkv[-1, heads, 0] = spoil
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    last = random(heads, seed=9) if sinks else None
    return attend(q, k, v, cache, batch, dim**-0.5, cap, last), cache


@examples
@given(
    positions=st.lists(st.integers(0, 150), min_size=1, max_size=5),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    window=st.sampled_from([None, 1, 7, 32, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cap=st.sampled_from([None, 0.5, 50.0]),
    sinks=st.booleans(),
    pairs=st.booleans(),
)
def test_decode_attention(
    kernels: Library,
    positions: list[int],
    group: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    dtype: torch.dtype,
    cap: float | None,
    sinks: bool,
    pairs: bool,
) -> None:
    def run(dtype: torch.dtype) -> tuple[Tensor, KVCache]:
        return decode(
            positions,
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
        output, cache = run(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "active", lambda: None)
        expected, same = run(dtype)
    tolerance = 0.02 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(cache.stored().keys, same.stored().keys)
    assert torch.equal(cache.stored().values, same.stored().values)


@pytest.mark.parametrize("window", [None, 6, 40])
def test_tokens_of_one_sequence_are_computed_as_one_by_one(
    kernels: Library, window: int | None
) -> None:
    """Chunks of 5 and 9 tokens, of which the second goes around the ring of 6, beside a token."""
    dtype, lengths, starts = torch.bfloat16, (1, 5, 9), (30, 37, 38)
    together, alone = (filled_cache(3, 50, 2, 64, window, dtype) for _ in range(2))
    spans = [
        Span(slot, start, [1] * length, 1)
        for slot, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    qkv = random(sum(lengths), 8, 64, seed=7, dtype=dtype)
    q, k, v = qkv.split((4, 2, 2), dim=1)
    found = attend(q, k, v, together, Batch.prepare(spans, CPU)[0], 0.125)
    expected = []
    for row, (slot, at) in enumerate(
        (span.slot, at) for span in spans for at in range(span.start, span.end)
    ):
        batch, _ = Batch.prepare([Span(slot, at, [1], 1)], CPU)
        one = slice(row, row + 1)
        expected.append(attend(q[one], k[one], v[one], alone, batch, 0.125))
    assert torch.equal(found, torch.cat(expected))
    assert torch.equal(together.stored().keys, alone.stored().keys)
    assert torch.equal(together.stored().values, alone.stored().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(kernels: Library, dtype: torch.dtype) -> None:
    one, _ = decode([40, 90, 7], 8, 2, 64, dtype=dtype)
    other, _ = decode([40, 90, 61], 8, 2, 64, dtype=dtype)
    assert torch.equal(one[:2], other[:2])
    assert not torch.equal(one[2], other[2])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spoiled_row_does_not_affect_others(
    kernels: Library, dtype: torch.dtype, value: float
) -> None:
    clean, _ = decode([40, 90, 7], 8, 2, 64, dtype=dtype)
    spoiled, _ = decode([40, 90, 7], 8, 2, 64, dtype=dtype, spoil=value)
    assert torch.equal(clean[:2], spoiled[:2])
    assert not torch.isfinite(spoiled[2]).all()


def test_other_head_sizes_go_by_torch(kernels: Library) -> None:
    output, _ = decode([5, 9], 4, 2, 24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "active", lambda: None)
        expected, _ = decode([5, 9], 4, 2, 24)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(
    "span", [Span(2, 1, [1], 1), Span(0, 16, [1], 1)], ids=["slot", "position"]
)
def test_what_lies_outside_the_cache_is_refused(span: Span, window: int | None) -> None:
    cache = filled_cache(2, 16, 1, 16, window, torch.float32)
    batch, _ = Batch.prepare([span], CPU)
    row = random(1, 1, 16, seed=0)
    with pytest.raises(IndexError):
        attend(row, row, row, cache, batch, 1.0)
