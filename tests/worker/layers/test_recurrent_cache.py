"""The cache of a gated delta net."""

from __future__ import annotations

import pytest
import torch

from worker.layers.batch import Batch, Span
from worker.layers.cache import Size
from worker.layers.delta_net import DeltaShape, GatedDeltaNet
from worker.layers.linear import LinearFactory
from worker.layers.recurrent_cache import RecurrentCache
from worker.layers.rope import Rotation

CPU = torch.device("cpu")
HIDDEN, SLOTS = 8, 4
SHAPE = DeltaShape(key_heads=1, value_heads=2, key_dim=4, value_dim=3, kernel=4)


@pytest.fixture(scope="module")
def net() -> GatedDeltaNet:
    linears = LinearFactory(torch.float32, CPU)
    net = GatedDeltaNet(HIDDEN, SHAPE, linears, eps=1e-6, grouped=False)
    random = torch.Generator().manual_seed(0)
    for slot in net.weight_map("net").values():
        slot.load(torch.randn(slot.shape, generator=random))
    return net


def inputs(slot: int, start: int, length: int) -> torch.Tensor:
    every = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(slot))
    return every[start : start + length]


def run(net: GatedDeltaNet, cache: RecurrentCache, spans: list[Span]) -> torch.Tensor:
    batch, ordered = Batch.prepare(spans, CPU)
    x = torch.cat([inputs(span.slot, span.start, span.length) for span in ordered])
    unused = Rotation(torch.empty(0), torch.empty(0))
    return net(x, unused, cache, batch)


def span(slot: int, start: int, length: int) -> Span:
    return Span(slot, start, [0] * length, 64)


def new_cache(net: GatedDeltaNet) -> RecurrentCache:
    cache = net.make_cache()
    cache.resize(Size(SLOTS, 64, 0), keep=0)
    return cache


@pytest.mark.parametrize("lengths", [[12], [1] * 12, [5, 1, 6], [1, 2, 9], [3, 1, 1, 7]], ids=str)
def test_chunks_and_single_tokens_continue_the_same_state(
    net: GatedDeltaNet, lengths: list[int]
) -> None:
    expected = run(net, new_cache(net), [span(2, 0, 12)])
    cache, start, outputs = new_cache(net), 0, []
    for length in lengths:
        outputs.append(run(net, cache, [span(2, start, length)]))
        start += length
    torch.testing.assert_close(torch.cat(outputs), expected, atol=1e-5, rtol=1e-5)


def test_sequences_in_one_batch_have_separate_states(net: GatedDeltaNet) -> None:
    cache = new_cache(net)
    run(net, cache, [span(0, 0, 4), span(3, 0, 6)])
    together = run(net, cache, [span(0, 4, 1), span(3, 6, 1)])
    for row, (slot, start) in enumerate([(0, 4), (3, 6)]):
        alone = new_cache(net)
        run(net, alone, [span(slot, 0, start)])
        expected = run(net, alone, [span(slot, start, 1)])
        torch.testing.assert_close(together[row : row + 1], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("slots", [3, 8])
def test_resize_keeps_the_first_slots_and_adds_zeroed_ones(net: GatedDeltaNet, slots: int) -> None:
    cache = new_cache(net)
    for slot in range(SLOTS):
        run(net, cache, [span(slot, 0, 5)])
    state, tail = cache.state.clone(), cache.inputs.clone()
    cache.resize(Size(slots, 512, 0), keep=2)
    assert state[:2].abs().amin(dim=(1, 2, 3)).gt(0).all()
    assert torch.equal(cache.state[:2], state[:2])
    assert torch.equal(cache.inputs[:2], tail[:2])
    assert not cache.state[2:].any()
    assert not cache.inputs[2:].any()


def test_a_cleared_slot_starts_a_new_sequence(net: GatedDeltaNet) -> None:
    expected = run(net, new_cache(net), [span(1, 0, 6)])
    cache = new_cache(net)
    assert cache.needs_clearing
    run(net, cache, [span(1, 20, 9), span(2, 0, 3)])
    kept = cache.state[2].clone()
    assert not torch.allclose(run(net, cache, [span(1, 0, 6)]), expected, atol=1e-3)
    cache.clear(1)
    assert torch.equal(run(net, cache, [span(1, 0, 6)]), expected)
    assert torch.equal(cache.state[2], kept)


def test_bytes_for_counts_what_resize_allocates(net: GatedDeltaNet) -> None:
    cache = new_cache(net)
    held = cache.inputs.nbytes + cache.state.nbytes
    assert held == cache.bytes_for(Size(SLOTS, 64, 9)) == cache.bytes_for(Size(SLOTS, 10**6, 0))
    assert cache.bytes_for(Size(2 * SLOTS, 64, 9)) == 2 * held


def test_what_lies_outside_the_cache_is_refused(net: GatedDeltaNet) -> None:
    cache = new_cache(net)
    run(net, cache, [span(SLOTS - 1, 3, 1)])
    with pytest.raises(IndexError):
        run(net, cache, [span(SLOTS, 3, 1)])


def test_the_storage_is_known_by_its_place(net: GatedDeltaNet) -> None:
    cache = new_cache(net)
    place = cache.stored().place
    run(net, cache, [span(1, 0, 3), span(2, 4, 1)])
    cache.clear(2)
    cache.resize(Size(SLOTS, 512, 0), keep=SLOTS)
    assert cache.stored().place == place
    kept = cache.stored()  # whose memory nothing else gets
    cache.resize(Size(2 * SLOTS, 512, 0), keep=SLOTS)
    assert not {*cache.stored().place} & {*kept.place}
